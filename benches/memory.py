"""Memory of workers at published widths beside what `triptych models` says before anything is loaded.

Configurations are those of `tests/golden/real_widths` (two layers of each kind), with weights of zeros in files that take no room, and
the tokenizer and processor of a golden model of the family. An encoder worker and a PD worker start, and their anonymous memory is
read once they are ready. Each is told the least `--memory-mib` that it accepts, which it has to keep. Of a model of several towers an encoder worker of each starts as well. What is kept of weights, caches and states alone, to the byte, is a test: `services/models/tests/memory.rs`.

    python3 benches/memory.py --binary target/release/triptych [--only NAME...]
"""

import argparse
import json
import math
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
PRECISION = "bf16"
READY_S = 120

MEL = {"chunk_length": 30, "n_samples": 480000, "nb_max_frames": 3000, "feature_size": 128}


def square(side):
    return {"size": {"height": side, "width": side}}


# Configuration, golden model with its other files, and changed keys of its processor.
CASES = (
    ("whisper_large_v3", "whisper_multilingual", MEL),
    ("bart_large", "bart_large_cnn", {}),
    ("pegasus_large", "pegasus_xsum", {}),
    ("nllb_3_3b", "nllb_600m", {}),
    ("flan_t5_xl", "flan_t5", {}),
    ("bert2bert_base", "bert2bert", {}),
    ("llama_3_1_8b", "llama_biased", {}),
    ("mistral_7b", "mistral_windowed", {}),
    ("qwen2_5_7b", "qwen2_tied", {}),
    ("qwen3_8b", "qwen3_windowed_layers", {}),
    ("gemma_2_9b", "gemma2_low_caps", {}),
    ("qwen2_vl_7b", "qwen2_vl_two_images", {}),
    ("qwen2_5_vl_7b", "qwen2_5_vl_window56", {}),
    ("qwen3_vl_8b", "qwen3_vl_untied", {}),
    ("qwen3_5_0_8b", "qwen3_5_tied", {}),
    ("glm_ocr", "glm_ocr_mrope", {"patch_size": 14}),
    ("llava_1_5_7b", "llava_clip_llama", {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}),
    ("smolvlm_2_2b", "smolvlm_split", {"max_image_size": {"longest_edge": 378}}),
    ("internvl3_8b", "internvl_qwen2", square(448)),
    ("gemma_3_4b", "gemma3_old_keys", square(896)),
    ("pixtral_12b", "pixtral_silu", {"patch_size": 16, "size": {"longest_edge": 1024}}),
    ("lighton_ocr_1b", "lighton_ocr_qwen3", {"patch_size": 14, "size": {"longest_edge": 1540}}),
    ("qwen2_audio_7b", "qwen2_audio_odd_heads", MEL),
    ("voxtral_mini_3b", "voxtral_odd_heads", MEL),
    ("cogagent_18b", "cogagent_chat", {}),
    ("moonshine_base", "moonshine_small_f32", {}),
)


def write_zeros(path, shapes):
    """Weights in bf16; the file is a hole behind its header."""
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def write_model(folder, case, golden, changed):
    for file in (GOLDEN / golden / "model").iterdir():
        if file.is_file() and "safetensors" not in file.name and file.name != "config.json":
            shutil.copy(file, folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if changed and (folder / name).exists():
            keys = json.loads((folder / name).read_text())
            known = {k: v for k, v in changed.items() if k in keys or k == "size" and name.startswith("pre")}
            (folder / name).write_text(json.dumps(keys | known))
    given = json.loads((GOLDEN / "real_widths" / case / "expected.json").read_text())
    (folder / "config.json").write_text(json.dumps(given["config"]))
    write_zeros(folder / "model.safetensors", given["shapes"])


def foretold_workers(binary, folder):
    """Roles and towers of the workers that there are, with foretold bytes of weights, and of activations of an encoder's example."""
    command = [binary, "models", "--json", f"m={folder}"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]
    loaded = lambda stage: stage["loaded_bytes"][PRECISION]
    if told["stages"]["encoder"]:
        yield "encoder", "", loaded(told["stages"]["encoder"]), told["example"]["activation_bytes"][PRECISION]
    for tower in told["towers"]:
        yield "encoder", tower["name"], loaded(tower["stage"]), tower["activation_bytes"][PRECISION]
    yield "pd", "", loaded(told["stages"]["decoder"]), 0


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def command_of(binary, role, tower, folder, store):
    towers = ["--towers", tower] if tower else []
    return [binary, role, "--model", f"m={folder}", "--precision", PRECISION, "--ec", f"disk:{store}", *towers]


def least_mib(command):
    """The least `--memory-mib` of a worker, as it says itself; less is refused before a weight is read."""
    few = ["--grpc", "127.0.0.1:0", "--memory-mib", "100"]
    refused = subprocess.run([*command, *few], capture_output=True, text=True)
    found = re.search(r"(\d+) or more are needed", refused.stderr + refused.stdout)
    assert refused.returncode and found, refused.stderr
    return int(found[1])


def worker_bytes(command, *flags):
    """Anonymous memory of a worker that is ready."""
    grpc, admin = free_port(), free_port()
    process = subprocess.Popen(
        [*command, "--grpc", f"127.0.0.1:{grpc}", "--admin", f"127.0.0.1:{admin}", *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(READY_S * 5):
            time.sleep(0.2)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{admin}/readyz", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, f"{command} ended with {process.returncode}"
        else:
            raise TimeoutError(f"{command} is not ready after {READY_S} s")
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024
    finally:
        process.terminate()
        process.wait()


def workers_of(binary, case, golden, changed):
    with tempfile.TemporaryDirectory() as root:
        folder, store = pathlib.Path(root) / "model", pathlib.Path(root) / "store"
        folder.mkdir()
        write_model(folder, case, golden, changed)
        for role, tower, foretold, activations in foretold_workers(binary, folder):
            command = command_of(binary, role, tower, folder, store)
            least = least_mib(command)
            measured = worker_bytes(command, "--memory-mib", str(least))
            yield f"{role} {tower}".strip(), foretold, activations, least, measured


def mib(n):
    return f"{n / (1 << 20):.1f}"


HEADER = """| configuration | worker | weights foretold, MiB | activations foretold, MiB | least --memory-mib | measured, MiB | beyond weights, MiB |
| --- | --- | ---: | ---: | ---: | ---: | ---: |"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    wrong = []
    print(HEADER)
    for name, golden, changed in CASES:
        if options.only and name not in options.only:
            continue
        for role, foretold, activations, least, measured in workers_of(options.binary, name, golden, changed):
            cells = [name, role, mib(foretold), mib(activations) if activations else "–", str(least)]
            cells += [mib(measured), mib(measured - foretold)]
            print(f"| {' | '.join(cells)} |", flush=True)
            if not foretold <= measured <= least << 20:
                wrong.append(f"{name}: the {role} worker has {mib(measured)} MiB, foretold are {mib(foretold)}")
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
