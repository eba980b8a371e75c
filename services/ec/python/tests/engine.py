"""One vLLM engine on the CPU in a process of its own: engine.py MODEL ROLE SETTINGS STEPS [DTYPE]; prints JSON.

ROLE is `none` or a role of `ECTransferConfig`. STEPS is JSON: a list of batches of requests `{"seed": N, "pixels": bool,
"grid": [t, h, w]}`; an item is named by its seed, or by `"name"`, and is a file where `"image"` says so. A step may be
`{"shell": COMMAND}`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    model, role, settings, steps = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
    import vllm

    dtype = sys.argv[5] if len(sys.argv) > 5 else "bfloat16"
    options = {}
    if role != "none":
        options["ec_transfer_config"] = {
            "ec_connector": "TriptychECConnector",
            "ec_connector_module_path": "triptych_ec.vllm_connector",
            "ec_role": role,
            "ec_connector_extra_config": settings,
        }
    llm = vllm.LLM(
        model,
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_mm_embeds=True,
        limit_mm_per_prompt={"image": 2},
        mm_processor_cache_gb=0,
        seed=0,
        **options,
    )
    answers = []
    for step in steps:
        if isinstance(step, dict):
            subprocess.run(step["shell"], shell=True, check=True)
            continue
        sampling = vllm.SamplingParams(temperature=0, max_tokens=8)
        outputs = llm.generate([prompt(request) for request in step], sampling, use_tqdm=False)
        answers.append([answer(output) for output in outputs])
    print("RESULT " + json.dumps({"answers": answers, "counters": counters(llm)}), flush=True)
    shutdown(llm)


def prompt(request: dict) -> dict:
    text = "<|vision_start|><|image_pad|><|vision_end|>what is this?"
    name = request.get("name") or f"image-{request['seed']}"
    if "image" in request:
        from PIL import Image

        image = Image.open(request["image"]).convert("RGB")
    elif request["pixels"]:
        image = random_image(request["seed"])
    else:
        import torch

        image = {"image_grid_thw": torch.tensor([request["grid"]])}
    return {"prompt": text, "multi_modal_data": {"image": image}, "multi_modal_uuids": {"image": [name]}}


def random_image(seed: int):
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def answer(output) -> dict:
    (choice,) = output.outputs
    params = getattr(output, "ec_transfer_params", None)
    return {"tokens": list(choice.token_ids), "finish": choice.finish_reason, "params": params}


def counters(llm) -> dict[str, int]:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.ec_connector
    if scheduler is None:
        return {}
    from vllm.distributed.ec_transfer import get_ec_transfer

    worker = get_ec_transfer()
    worker._worker.publisher.flush(30)
    total = {}
    for connector in (scheduler, worker):
        for (name, outcome), n in connector.counters._total.items():
            total[f"{name} {outcome}".strip()] = max(n, total.get(f"{name} {outcome}".strip(), 0))
    return total


def shutdown(llm) -> None:
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
