"""Golden files of videos: sampling, rows, positions and logits of Qwen-VL's golden models, and small files of each container.

The models are those of `qwen.py`, which writes them anew with what lies beside them: run this after it. Two things follow
transformers 4.57, with which the checkpoints were published, not 5.24: text behind a video goes on past its last frame's
position, as vLLM has it too, and frames of Qwen3-VL and its successors stand in the place of the whole video, the tokens around it
included.
"""

import copy
import io
import json
import math
import zlib

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl import video_processing_qwen2_vl as processing_2
from transformers.models.qwen3_vl import video_processing_qwen3_vl as processing_3
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from common import MIN_GAP, ROOT, generator, plain_experts, smallest_gap, write_compact, write_json, write_tensors
from qwen import KIND2, KIND2_5, KIND3, KIND3_5, KIND3_MOE, KINDS3, TEXTS, image, processor

STEPS = 24
# Frames, height, width and frames a second of the clips of each case; an odd number repeats the last frame.
CASES = [
    ("qwen2_vl_two_images", KIND2, {"a": (6, 56, 84, 3.0), "b": (3, 84, 56, 1.0)}),
    ("qwen2_5_vl_window112", KIND2_5, {"a": (4, 84, 140, 3.0), "b": (5, 56, 84, 2.5)}),
    ("qwen2_5_vl_untied_nested", KIND2_5, {"a": (8, 56, 56, 0.5), "b": (2, 28, 168, 2.0)}),
    ("qwen3_vl_wide_heads", KIND3, {"a": (6, 64, 96, 3.0), "b": (3, 96, 64, 4.0)}),
    ("qwen3_vl_moe_dense_layer", KIND3_MOE, {"a": (4, 64, 64, 2.0), "b": (3, 64, 96, 4.0)}),
    ("qwen3_5_tied", KIND3_5, {"a": (4, 64, 64, 3.0), "b": (3, 64, 96, 1.0)}),
]
PROMPTS = [["a"], ["b"], ["a", "image", "b"], ["image", "b", "b"]]


def clip(n, height, width, seed):
    """Frames of a pattern that moves, in steps of sixteen so that files are small."""
    rng = generator(seed, "video")
    y, x = np.mgrid[0:height, 0:width] / 20
    speed, phase = rng.uniform(0.5, 1.5, 3), rng.uniform(0, 6, 3)
    frames = []
    for i in range(n):
        planes = [np.sin(x + speed[k] * i + phase[k]) + np.cos(y - speed[k] * i / 2 + k) for k in range(3)]
        pixels = np.stack(planes, -1) * 60 + 128
        top, left = (7 * i) % (height - 10), (11 * i) % (width - 12)
        pixels[top:top + 10, left:left + 12] = (240, 40 + 10 * i, 20)
        frames.append((np.clip(pixels, 0, 255) // 16 * 16).astype(np.uint8))
    return np.stack(frames)


def save_strip(path, frames):
    """Frames one under the other as one PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(list(frames))).save(path, optimize=True)


def positions_of(ids, config, items):
    """transformers 4.57's `get_rope_index` for one sequence; `items` are (is a video, grid, seconds a frame) in order."""
    merge, kind = config.vision_config.spatial_merge_size, config.model_type
    if kind in [k.name for k in KINDS3]:
        items = [part for v, (t, h, w), s in items for part in ([(v, (1, h, w), s)] * t if v else [(v, (t, h, w), s)])]
    out, at, i, waiting = [], 0, 0, iter(items)
    while i < len(ids):
        if ids[i] not in (config.image_token_id, config.video_token_id):
            out.append([at] * 3)
            at, i = at + 1, i + 1
            continue
        is_video, (t, h, w), seconds = next(waiting)
        step = config.vision_config.tokens_per_second * seconds if is_video and kind == "qwen2_5_vl" else 1
        frames = (torch.arange(t) * torch.tensor(step, dtype=torch.float32)).long().tolist()
        rows = [[at + f, at + y, at + x] for f in frames for y in range(h // merge) for x in range(w // merge)]
        out += rows
        at, i = max(max(r) for r in rows) + 1, i + len(rows)
    assert next(waiting, None) is None
    return torch.tensor(out).T[:, None], at


def inputs_of(kind, proc, videos, names, text):
    """Rendered conversation, model inputs, and the items in order."""
    parts = [{"type": "image"} if n == "image" else {"type": "video"} for n in names] + [{"type": "text", "text": text}]
    rendered = proc.apply_chat_template([{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True)
    asked = rendered
    if kind in KINDS3:
        asked = rendered.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    used = [videos[n] for n in names if n != "image"]
    still = [image("64x96" if kind in KINDS3 else "56x84") for n in names if n == "image"]
    meta = [VideoMetadata(total_num_frames=len(f), fps=fps, frames_indices=list(range(len(f)))) for f, fps in used]
    got = proc(text=[asked], images=still or None, videos=[torch.from_numpy(f).permute(0, 3, 1, 2) for f, _ in used],
               video_metadata=meta, do_sample_frames=False, return_tensors="pt")
    grids, stills, items = iter(got["video_grid_thw"].tolist()), iter(got.get("image_grid_thw", torch.empty(0)).tolist()), []
    rates = iter(fps for _, fps in used)
    for n in names:
        items.append((False, next(stills), 0) if n == "image" else (True, next(grids), 2 / next(rates)))
    keys = ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    return rendered, {k: got[k] for k in keys if k in got}, items


@torch.no_grad()
def greedy(model, inputs, positions, after):
    """Tokens and logits, everything computed again for each token."""
    made, rows = [], []
    ids = inputs["input_ids"]
    for step in range(STEPS):
        model.model.rope_deltas = None
        logits = model(**{**inputs, "input_ids": ids}, position_ids=positions, use_cache=False).logits[0, -1]
        rows.append(logits)
        made.append(int(logits.argmax()))
        ids = torch.cat([ids, torch.tensor([[made[-1]]])], 1)
        positions = torch.cat([positions, torch.full((3, 1, 1), after + step)], 2)
    return made, torch.stack(rows)


def all_levels(features):
    levels = [features.pooler_output, *(getattr(features, "deepstack_features", None) or [])]
    return [torch.cat(rows, dim=-1) for rows in zip(*levels, strict=True)]


@torch.no_grad()
def make_case(case, kind, clips):
    print(case, flush=True)
    folder = ROOT / case
    model = kind.model.from_pretrained(folder / "model", dtype=torch.float32).eval()
    if kind is KIND3_MOE:
        plain_experts(model)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    shape = type("Shape", (), {"kind": kind})
    proc = processor(shape, tok)
    proc.video_processor = kind.video.from_pretrained(folder / "model")
    videos = {name: (clip(n, h, w, k), fps) for k, (name, (n, h, w, fps)) in enumerate(clips.items())}
    tensors, meta, prompts, texts = {}, {}, [], list(TEXTS)
    for name, (frames, fps) in videos.items():
        save_strip(folder / f"videos/{name}.png", frames)
        _, got, items = inputs_of(kind, proc, videos, [name], "x")
        assert items[0][1][1:] == [frames.shape[1] // kind.patch, frames.shape[2] // kind.patch], "it was resized"
        tensors[f"video.{name}.embeds"] = all_levels(model.model.get_video_features(
            got["pixel_values_videos"], got["video_grid_thw"], return_dict=True))[0]
        tensors[f"video.{name}.pixel_sums"] = got["pixel_values_videos"].double().sum(1).float()
        meta[name] = {"file": f"videos/{name}.png", "n_frames": len(frames), "fps": fps, "grid_thw": items[0][1]}
    for names in PROMPTS:
        for text in list(texts):
            rendered, inputs, items = inputs_of(kind, proc, videos, names, text)
            ids = inputs["input_ids"][0].tolist()
            positions, after = positions_of(ids, model.config, items)
            model.model.rope_deltas = None
            logits = model(**inputs, position_ids=positions).logits[0]
            blind = {**inputs, "pixel_values_videos": torch.zeros_like(inputs["pixel_values_videos"])}
            sight = float((model(**blind, position_ids=positions).logits[0, -1] - logits[-1]).abs().max())
            made, rows = greedy(model, inputs, positions, after)
            if smallest_gap(rows) >= 5 * MIN_GAP and sight > 0.3:
                texts.remove(text)
                break
        else:
            raise RuntimeError(f"no text works for {names}")
        k = len(prompts)
        kept = torch.tensor(sorted({*range(0, len(ids), 9), len(ids) - 1}))
        tensors |= {f"prompt.{k}.position_ids": positions[:, 0], f"prompt.{k}.logit_rows": kept,
                    f"prompt.{k}.input_ids": inputs["input_ids"][0],
                    f"prompt.{k}.logits": logits[kept],
                    f"prompt.{k}.logits_bf16": narrow(**inputs, position_ids=positions).logits[0].float()[kept]}
        prompts.append({"items": names, "text": text, "rendered": rendered, "next_position": after,
                        "greedy_tokens": made, "image": "64x96" if kind in KINDS3 else "56x84"})
    still = image("64x96" if kind in KINDS3 else "56x84")
    buffer = io.BytesIO()
    still.save(buffer, "PNG", optimize=True)
    (folder / "videos/still.png").write_bytes(buffer.getvalue())
    write_compact(folder / "video.json", {"videos": meta, "prompts": prompts, "file": from_file(kind, model, proc, texts)})
    write_tensors(folder / "video.safetensors", tensors)


@torch.no_grad()
def from_file(kind, model, proc, texts):
    """Answer about an animation, of which the processor takes some frames; it needs no resize."""
    name = "moving32.gif" if kind in KINDS3 else "moving.gif"
    moving, frames = Image.open(ROOT / "video" / name), []
    for i in range(moving.n_frames):
        moving.seek(i)
        frames.append(np.array(moving.convert("RGB")))
    meta = VideoMetadata(total_num_frames=len(frames), fps=4.0)
    indices = [int(i) for i in proc.video_processor.sample_frames(metadata=meta, fps=2)]
    meta.frames_indices = indices
    for text in texts:
        content = [{"type": "video"}, {"type": "text", "text": text}]
        asked = proc.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        if kind in KINDS3:
            asked = asked.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
        video = torch.from_numpy(np.stack([frames[i] for i in indices])).permute(0, 3, 1, 2)
        got = proc(text=[asked], videos=[video], video_metadata=[meta], do_sample_frames=False, return_tensors="pt")
        inputs = {k: got[k] for k in ("input_ids", "pixel_values_videos", "video_grid_thw")}
        grid = got["video_grid_thw"][0].tolist()
        assert grid[1:] == [frames[0].shape[0] // kind.patch, frames[0].shape[1] // kind.patch], "it was resized"
        ids = inputs["input_ids"][0].tolist()
        positions, after = positions_of(ids, model.config, [(True, grid, 2 / meta.sampled_fps)])
        made, rows = greedy(model, inputs, positions, after)
        if smallest_gap(rows) >= 5 * MIN_GAP:
            return {"path": f"video/{name}", "text": text, "n_prompt": len(ids), "greedy_tokens": made,
                    "greedy_text": proc.tokenizer.decode(made, skip_special_tokens=True)}
    raise RuntimeError("no text works for a file")


def sampling(kind, settings, total, fps, size):
    """Frames, grid and times of a video that is never decoded."""
    cls = processing_2.Qwen2VLVideoProcessor if kind == "per_frame" else processing_3.Qwen3VLVideoProcessor
    proc = cls(**settings)
    asked = {"num_frames": proc.num_frames} if proc.num_frames else {"fps": proc.fps or 2}
    if proc.num_frames:
        proc.fps = None
    meta = VideoMetadata(total_num_frames=total, fps=fps)
    try:
        frames = [int(i) for i in proc.sample_frames(metadata=meta, **asked)]
    except (ValueError, ZeroDivisionError):
        return None
    if len(set(frames)) < len(frames):
        # Qwen3-VL's would take a frame twice; what is served refuses a number above that of the frames.
        return None
    seen = {}
    kept, BaseVideoProcessor.resize = BaseVideoProcessor.resize, lambda self, image, size, **_: seen.update(size=size)
    videos = np.broadcast_to(np.uint8(0), (1, len(frames), 3, *size))
    proc.resize(videos, size=proc.size, resample=None, factor=proc.patch_size * proc.merge_size,
                temporal_factor=2, cap_pixels_per_frame=settings.get("cap_pixels_per_frame", False))
    BaseVideoProcessor.resize = kept
    padded = frames + frames[-1:] * (len(frames) % 2)
    times = [(padded[i] / fps + padded[i + 1] / fps) / 2 for i in range(0, len(padded), 2)]
    interval = 2 / (len(frames) / total * fps)
    return {"frames": frames, "size": [seen["size"].height, seen["size"].width], "interval": interval,
            "times": [f"{t:.1f}" for t in times]}


def make_sampling():
    records = []
    for kind in ("per_frame", "over_frames"):
        for settings in ({}, {"fps": 1.5}, {"num_frames": 12}, {"cap_pixels_per_frame": True},
                         {"min_frames": 8, "max_frames": 20},
                         {"size": {"shortest_edge": 4096, "longest_edge": 25165824 if kind == "over_frames" else 200704}}):
            for total, fps, size in ((2, 25, (48, 64)), (3, 2, (300, 500)), (31, 29.97, (240, 320)), (90, 30, (720, 1280)),
                                     (61, 12.5, (333, 777)), (250, 25, (1080, 1920)), (1999, 23.976, (64, 64))):
                values = sampling(kind, dict(settings, cap_pixels_per_frame=settings.get("cap_pixels_per_frame", False)),
                                  total, fps, size)
                records.append({"kind": kind, "settings": settings, "n_frames": total, "fps": fps, "size": size,
                                "expect": values})
    write_compact(ROOT / "video/sampling.json", records)


def encode(codec, path, frames, fps, options, pixels):
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.options = pixels, options
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def decoded(path):
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        planes = [frame.to_ndarray(format="yuv420p").tobytes() for frame in frames]
        return {"fps": float(stream.average_rate), "adler32": [zlib.adler32(p) for p in planes]}, [
            frame.to_ndarray(format="rgb24") for frame in frames]


def make_media():
    folder = ROOT / "video"
    frames, facts = clip(24, 56, 84, 7), {}
    small = {"bframes": "3", "x264-params": "keyint=10:scenecut=0:8x8dct=1:threads=1", "crf": "28"}
    encode("libx264", folder / "high.mp4", frames, 12, {**small, "preset": "medium"}, "yuv420p")
    encode("libx264", folder / "baseline.mp4", frames[:8], 12, {"profile": "baseline", "crf": "30"}, "yuv420p")
    encode("libx264", folder / "fields.mp4", frames[:4], 12, {"x264-params": "interlaced=1"}, "yuv420p")
    encode("libx264", folder / "chroma444.mp4", frames[:4], 12, {"crf": "30"}, "yuv444p")
    encode("mjpeg", folder / "motion.mp4", frames[:6], 6, {"qmin": "8", "qmax": "8"}, "yuvj420p")
    encode("mpeg4", folder / "part2.mp4", frames[:4], 12, {}, "yuv420p")
    encode("libvpx-vp9", folder / "vp9.webm", frames[:4], 12, {}, "yuv420p")
    for name in ("high.mp4", "baseline.mp4", "motion.mp4"):
        facts[name], rgb = decoded(folder / name)
        save_strip(folder / f"{name}.png", rgb[::5])
    stills = [Image.fromarray(f).quantize(24) for f in frames[:10]]
    stills[0].save(folder / "moving.gif", save_all=True, append_images=stills[1:], duration=250, disposal=1)
    colours = [Image.fromarray(f) for f in frames[:6]]
    colours[0].save(folder / "moving.webp", save_all=True, append_images=colours[1:], duration=250, lossless=True)
    for name, fps in (("moving.gif", 4.0), ("moving.webp", 4.0)):
        moving = Image.open(folder / name)
        rgb = []
        for i in range(moving.n_frames):
            moving.seek(i)
            rgb.append(np.array(moving.convert("RGB")))
        facts[name] = {"fps": fps, "n_frames": len(rgb)}
        save_strip(folder / f"{name}.png", rgb[::5])
    colours[0].save(folder / "still.webp", lossless=True)
    wide = [Image.fromarray(f).quantize(24) for f in clip(6, 64, 96, 8)]
    wide[0].save(folder / "moving32.gif", save_all=True, append_images=wide[1:], duration=250, disposal=1)
    write_json(folder / "media.json", facts)


def make():
    make_sampling()
    make_media()
    for case, kind, clips in CASES:
        make_case(case, kind, clips)


if __name__ == "__main__":
    make()
