"""Qwen2-VL in peers, for rivals.py: encode an image, read a prompt that holds its rows, and write greedily.

The prompt is the image and --text-tokens of text. Reading it (`prefill`, batch 1) takes the image's rows as they are,
encoded before; decode counts the tokens after the first, and neither encode nor prefill.
"""

import os

from rivals import decoded, encoded, more, timed, torch_model


def image(args):
    """Patches of the image `[n_patches, patch_dim]`, and its grid `[1, 3]`."""
    import transformers
    from PIL import Image

    processor = transformers.AutoImageProcessor.from_pretrained(args.directory)
    inputs = processor(Image.open(args.item).convert("RGB"), return_tensors="pt")
    return inputs["pixel_values"], inputs["image_grid_thw"]


def text(args):
    return [10 + i % 80 for i in range(args.text_tokens)]


def of_torch(args, dtype):
    import torch

    model = torch_model(args, dtype)
    yield None
    patches, grid = image(args)
    patches, visual = patches.to(model.dtype), model.model.visual
    visual(patches, grid_thw=grid)
    took, rows = timed(lambda: visual(patches, grid_thw=grid).pooler_output, args.repeats)
    yield encoded(took)
    config = model.config
    ids = torch.tensor([[config.vision_start_token_id, *[config.image_token_id] * len(rows), config.vision_end_token_id, *text(args)]])
    is_image = ids == config.image_token_id
    embeds = model.get_input_embeddings()(ids)
    embeds[is_image] = rows
    positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=is_image.int(), image_grid_thw=grid)

    def read():
        return model(inputs_embeds=embeds, position_ids=positions, use_cache=True, logits_to_keep=1)

    read()
    took, first = timed(read, args.repeats)
    yield "prefill", {"tokens": ids.shape[1], "tokens_per_s": ids.shape[1] / took}
    for batch in args.batches:
        took = min(write(args, model, first, cache(args, model, first, batch, kind), positions.max() + 1)
                   for kind in ("grows", "fixed") for _ in range(args.repeats))
        yield decoded(batch, batch * (args.new_tokens - 1) / took)


def cache(args, model, first, batch, kind):
    """The prompt's keys and values, for each sequence its own.

    One that grows copies all of itself at every step, one of a fixed length attends to all of that: the first is faster
    alone, the second in batches.
    """
    import transformers

    config, n_prompt = model.config.text_config, first.past_key_values.get_seq_length()
    if kind == "grows":
        found = transformers.DynamicCache(config=config)
    else:
        found = transformers.StaticCache(config=config, max_cache_len=n_prompt + args.new_tokens)
    for i, layer in enumerate(first.past_key_values.layers):
        found.update(layer.keys.repeat(batch, 1, 1, 1), layer.values.repeat(batch, 1, 1, 1), i)
    return found


def write(args, model, first, cache, position):
    """Seconds that all tokens after the first take. A loop of its own: `generate` was tried, and is no faster."""
    batch = cache.layers[0].keys.shape[0]
    token = first.logits[:, -1].argmax(-1, keepdim=True).repeat(batch, 1)

    def rest():
        nonlocal token
        for i in range(args.new_tokens - 1):
            at = (position + i).expand(3, batch, 1)
            logits = model(input_ids=token, position_ids=at, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].argmax(-1, keepdim=True)

    return timed(rest)[0]


def of_vllm(args, dtype):
    """vLLM in this process, on the CPU. What it takes to a first token is taken off where a rate is of later ones."""
    # Its engine in this process, so that the memory told is all of it; threads where the system puts them.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
                   "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    import torch
    import vllm

    torch.set_grad_enabled(False)
    llm = vllm.LLM(
        str(args.directory), dtype={"f32": "float32", "bf16": "bfloat16"}[dtype], max_model_len=2048, max_num_seqs=max(args.batches),
        enable_prefix_caching=False, enable_mm_embeds=True, limit_mm_per_prompt={"image": 1}, mm_processor_cache_gb=0, seed=0)
    yield None
    patches, grid = image(args)

    def see(model):
        visual = model.visual
        visual(patches.to(visual.dtype), grid_thw=grid.tolist())
        return timed(lambda: visual(patches.to(visual.dtype), grid_thw=grid.tolist()), args.repeats)

    took, rows = llm.apply_model(see)[0]
    yield encoded(took)
    config = llm.llm_engine.model_config.hf_config
    ids = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id, *text(args)]
    n_prompt = len(ids) - 1 + len(rows)
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": {"image_embeds": rows, "image_grid_thw": grid}}}

    def answer(batch, n):
        settings = vllm.SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
        return timed(lambda: llm.generate([prompt] * batch, settings, use_tqdm=False), args.repeats)[0]

    answer(1, 2)
    yield "prefill", {"tokens": n_prompt, "tokens_per_s": n_prompt / answer(1, 1)}
    for batch in args.batches:
        began = answer(batch, 1)
        yield decoded(batch, batch * (args.new_tokens - 1) / more(args, answer(batch, args.new_tokens), began))
