"""Golden files of preprocessing: Qwen2-VL's image processor, its resize rule, and Whisper's log-mel."""

import io
import warnings
import wave
import zlib

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from common import ROOT, generator, write_compact, write_tensors

OUT = ROOT / "preprocess"
SMALL, LARGE = (3136, 12845056), (3136, 15680)


def scene(height, width, seed, channels=3):
    """Smooth waves under hard edges, so that a resize filter shows its kind and a PNG stays small."""
    rng = generator(seed, "scene")
    y, x = np.mgrid[0:height, 0:width]
    planes = []
    for _ in range(channels):
        fx, fy, p = rng.uniform(0.02, 0.2), rng.uniform(0.02, 0.2), rng.uniform(0, 6)
        plane = 128 + 70 * np.sin(fx * x + p) * np.cos(fy * y) + 50 * (((x // 9) + (y // 7)) % 2)
        planes.append(plane)
    return (np.clip(np.stack(planes, -1), 0, 255) // 4 * 4).astype(np.uint8)


def sample_images():
    """Name to (file suffix, PIL image, save options, (min_pixels, max_pixels))."""
    gray = lambda seed, h, w: Image.fromarray(scene(h, w, seed, 1)[..., 0])
    rgba = Image.fromarray(scene(45, 70, 3, 4), "RGBA")
    palette = Image.fromarray(scene(50, 61, 4)).quantize(16, method=Image.Quantize.MEDIANCUT)
    see_through = Image.fromarray(scene(40, 66, 5)).quantize(8, method=Image.Quantize.MEDIANCUT)
    rotated = Image.fromarray(scene(60, 84, 6))
    exif = Image.Exif()
    exif[0x0112] = 6
    flipped = Image.Exif()
    flipped[0x0112] = 5
    return {
        "rgb": ("png", Image.fromarray(scene(75, 100, 1)), {}, SMALL),
        "rgb_exact": ("png", Image.fromarray(scene(56, 56, 2)), {}, SMALL),
        "rgba": ("png", rgba, {}, SMALL),
        "palette": ("png", palette, {}, SMALL),
        "palette_transparent": ("png", see_through, {"transparency": 3}, SMALL),
        "gray": ("png", gray(7, 58, 43), {}, SMALL),
        "gray_alpha": ("png", Image.merge("LA", (gray(8, 57, 60), gray(9, 57, 60))), {}, SMALL),
        "bilevel": ("png", gray(10, 61, 62).convert("1"), {}, SMALL),
        "exif_rotated_6": ("jpg", rotated, {"exif": exif, "quality": 90, "subsampling": 0}, SMALL),
        "exif_transposed_5": ("jpg", rotated, {"exif": flipped, "quality": 90, "subsampling": 0}, SMALL),
        "jpeg_420": ("jpg", Image.fromarray(scene(63, 90, 11)), {"quality": 80}, SMALL),
        "one_pixel": ("png", Image.fromarray(np.full((1, 1, 3), (200, 100, 50), np.uint8)), {}, SMALL),
        "tiny": ("png", Image.fromarray(scene(5, 7, 12)), {}, SMALL),
        "tall": ("png", Image.fromarray(scene(100, 2, 13)), {}, SMALL),
        "wide": ("png", Image.fromarray(scene(10, 1500, 14)), {}, SMALL),
        "large": ("png", Image.fromarray(scene(250, 350, 15) // 32 * 32), {}, LARGE),
    }


def patches_of(resized):
    """[H, W, 3] u8 to what the processor returns: [n_patches, 3*2*14*14] f32."""
    mean = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
    std = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
    x = (resized.astype(np.float64) / 255).astype(np.float32)
    x = (x - mean) / std
    gh, gw = resized.shape[0] // 14, resized.shape[1] // 14
    x = x.reshape(gh // 2, 2, 14, gw // 2, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.repeat(x.reshape(gh * gw, 3, 1, 14, 14), 2, axis=2).reshape(gh * gw, -1)


def resize(image, size, resample):
    """`image.resize(size)` in two calls, across first: the order that Pillow had up to 12.1, whatever is installed."""
    return image.resize((size[0], image.height), resample).resize(size, resample)


def make_images():
    tensors, rows = {}, []
    (OUT / "images").mkdir(parents=True, exist_ok=True)
    for name, (suffix, sample, options, (low, high)) in sample_images().items():
        data = io.BytesIO()
        sample.save(data, "JPEG" if suffix == "jpg" else "PNG", optimize=True, **options)
        (OUT / "images" / f"{name}.{suffix}").write_bytes(data.getvalue())
        decoded = Image.open(io.BytesIO(data.getvalue()))
        upright = ImageOps.exif_transpose(decoded)
        limits = {"min_pixels": low, "max_pixels": high}
        seen = Qwen2VLImageProcessorPil(**limits)(images=[upright], return_tensors="pt")
        as_opened = Qwen2VLImageProcessorPil(**limits)(images=[decoded], return_tensors="pt")
        other = Qwen2VLImageProcessor(**limits)(images=[upright], return_tensors="pt")

        rgb = Qwen2VLImageProcessorPil().process_image(upright, do_convert_rgb=True).transpose(1, 2, 0)
        height, width = smart_resize(*rgb.shape[:2], min_pixels=low, max_pixels=high)
        resized = np.array(resize(Image.fromarray(rgb), (width, height), Image.Resampling.BICUBIC))
        values = seen["pixel_values"].numpy()
        grid = seen["image_grid_thw"][0].tolist()
        assert grid == [1, height // 14, width // 14]
        std = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
        order = (np.abs(patches_of(resized) - values).reshape(-1, 3, 392).max((0, 2)) * std * 255).max()
        assert order < (2 if down_first(rgb.shape, (height, width)) else 1e-3), name
        apart = (seen["pixel_values"] - other["pixel_values"]).abs().numpy().reshape(-1, 3, 392).max((0, 2)) * std * 255
        row = {
            "name": name, "file": f"images/{name}.{suffix}", "mode": decoded.mode, "min_pixels": low,
            "max_pixels": high, "opened_size_hw": [decoded.height, decoded.width],
            "upright_size_hw": list(rgb.shape[:2]), "resized_hw": [height, width], "grid_thw": grid,
            "processor_alone_applies_exif": bool(decoded.size == upright.size and torch.equal(
                as_opened["pixel_values"], seen["pixel_values"])) if "exif" in name else None,
            "torchvision_backend_max_diff_of_255": round(float(apart.max()), 3),
            "installed_pillow_max_diff_of_255": round(float(order), 3),
        }
        if row["mode"] != "RGB" or suffix == "jpg":
            tensors[f"{name}.rgb"] = rgb
        if row["mode"] in ("RGBA", "LA") or "transparent" in name:
            tensors[f"{name}.rgb_alpha_dropped"] = np.array(upright.convert("RGB"))
        tensors[f"{name}.resized"] = resized
        if name == "rgb_exact":
            tensors[f"{name}.pixel_values"] = values
        rows.append(row)
    write_tensors(OUT / "images.safetensors", tensors)
    write_compact(OUT / "images.json", {"backend": Qwen2VLImageProcessorPil().backend, "resample": "PIL BICUBIC (a=-0.5, "
                  "antialiased: support grows with the scale when shrinking)", "images": rows})


def down_first(before, after):
    """True where Pillow 13 makes the pass down before the pass across."""
    return before[0] > after[0] and before[0] - after[0] > 2 * (before[1] - after[1]) and before[1] != after[1]


def noise_image(height, width):
    """Bytes of the generator of `noise`, the high ones of its states."""
    out, x = np.empty(height * width * 3, np.uint8), width * 1000 + height
    for k in range(len(out)):
        x = (1664525 * x + 1013904223) % 2**32
        out[k] = x >> 24
    return Image.fromarray(out.reshape(height, width, 3))


# Height and width before and after; pixels are stored of these, and a checksum only of the larger ones.
RESIZES = [((1, 1), (5, 7)), ((1, 9), (3, 2)), ((7, 5), (3, 2)), ((5, 7), (5, 16)), ((16, 3), (4, 3)), ((23, 17), (9, 29)),
           ((17, 23), (29, 9)), ((2, 31), (8, 3)), ((33, 15), (14, 22)), ((40, 21), (3, 20)), ((18, 50), (15, 13))]
LARGE_RESIZES = [((257, 333), (140, 196)), ((100, 67), (224, 224)), ((600, 20), (28, 56)), ((31, 400), (97, 64))]


def make_resize():
    """Pillow's resize by all its filters, across first, and how far the installed version is from that."""
    tensors, rows = {}, []
    for k, (before, after) in enumerate(RESIZES + LARGE_RESIZES):
        image = noise_image(*before)
        for resample in range(6):
            across_first = np.array(resize(image, after[::-1], resample))
            installed = np.array(image.resize(after[::-1], resample))
            apart = np.abs(across_first.astype(int) - installed)
            row = {"from": before, "to": after, "resample": resample, "crc32": zlib.crc32(across_first.tobytes()),
                   "installed_differs_in": round(float((apart > 0).mean()), 4), "by_at_most": int(apart.max())}
            assert down_first(before, after) or not apart.any(), row
            if k < len(RESIZES):
                row["name"] = f"{k}.{resample}"
                tensors[row["name"]] = across_first
            rows.append(row)
    write_tensors(OUT / "resize.safetensors", tensors)
    write_compact(OUT / "resize.json", {"pillow": Image.__version__, "cases": rows})


def make_smart_resize():
    sizes = [(h, w) for h in (1, 14, 28, 42, 43, 70, 98, 126) for w in (14, 27, 42, 70, 100)]
    sizes += [(1080, 1920), (1920, 1080), (2160, 3840), (480, 640), (4000, 6000), (8000, 8000), (3584, 3584),
              (3585, 3584), (224, 224), (336, 336), (56, 56), (55, 57), (10, 1500), (1500, 10), (10, 2000), (10, 2001),
              (2001, 10), (1, 200), (1, 201), (5, 900), (28, 560), (560, 28), (600, 4), (50, 10000)]
    limits = [(3136, 12845056), (3136, 1003520), (200704, 1003520), (3136, 31360), (784, 3136)]
    rows = []
    for k, (h, w) in enumerate(sizes):
        for low, high in {limits[0], limits[1 + k % 4]} if k >= 40 else {limits[k % 5]}:
            row = {"height": h, "width": w, "factor": 28, "min_pixels": low, "max_pixels": high}
            try:
                row["resized"] = list(smart_resize(h, w, 28, low, high))
            except ValueError as error:
                row["error"] = str(error)
            rows.append(row)
    rows.sort(key=lambda r: tuple(r[k] for k in ("height", "width", "min_pixels", "max_pixels")))
    for h, w in ((0, 5), (5, 0)):
        rows.append({"height": h, "width": w, "factor": 28, "min_pixels": 3136, "max_pixels": 12845056,
                     "error": "ZeroDivisionError in the reference: refuse"})
    write_compact(OUT / "smart_resize.json", rows)


def noise(n, seed):
    """A generator that any language can repeat: x' = 1664525 x + 1013904223 mod 2^32, top 24 bits."""
    out, x = np.empty(n, np.float32), seed
    for k in range(n):
        x = (1664525 * x + 1013904223) % 2**32
        out[k] = (x >> 8) / 2**24 - 0.5
    return out


def waveforms():
    """Name to (samples, how to make them again)."""
    t = np.arange(480000) / 16000
    with wave.open(str(ROOT / "inputs" / "speech.wav")) as f:
        speech = np.frombuffer(f.readframes(f.getnframes()), "<i2").astype(np.float32) / 32768
    impulse = np.zeros(1000, np.float32)
    impulse[500] = 1
    return {
        "silence": (np.zeros(16000, np.float32), "16000 zeros"),
        "sine": ((0.5 * np.sin(2 * np.pi * 440 * t[:16000])).astype(np.float32), "0.5 sin(2 pi 440 t), 16000 samples"),
        "impulse": (impulse, "1000 samples, 1.0 at index 500"),
        "noise": (noise(33333, 7), "lcg seed 7, 33333 samples: (state >> 8) / 2^24 - 0.5"),
        "chirp_full": ((0.8 * np.sin(2 * np.pi * (50 * t + 125 * t * t))).astype(np.float32),
                       "0.8 sin(2 pi (50 t + 125 t^2)), 480000 samples: exactly one chunk"),
        "noise_too_long": (noise(480100, 9), "lcg seed 9, 480100 samples: cut to 480000"),
        "speech": (speech, "inputs/speech.wav, i16 / 32768"),
    }


def frames_kept(n_samples):
    """The stored ones of 3000 frames: the start, a comb, both sides of the signal's end, the tail."""
    end = min(n_samples // 160, 2999)
    keep = {*range(12), *range(20, 300, 20), *range(end - 3, end + 4), 1500, 2996, 2997, 2998, 2999}
    return sorted(k for k in keep if 0 <= k < 3000)


def make_log_mel():
    tensors, rows = {}, []
    for n_mels in (80, 128):
        extractor = WhisperFeatureExtractor(feature_size=n_mels)
        tensors[f"mel_filters.{n_mels}.row_sums"] = extractor.mel_filters.sum(0).astype(np.float32)
        for name, (samples, recipe) in waveforms().items():
            mel = extractor(samples, sampling_rate=16000, return_tensors="np").input_features[0]
            frames = frames_kept(len(samples))
            tensors[f"{name}.{n_mels}.frames"] = mel[:, frames]
            tensors[f"{name}.{n_mels}.row_means"] = mel.astype(np.float64).mean(1).astype(np.float32)
            rows.append({"name": name, "n_mels": n_mels, "n_samples": len(samples), "recipe": recipe,
                         "shape": list(mel.shape), "frames": frames, "max": float(mel.max()), "min": float(mel.min()),
                         "mean": float(mel.astype(np.float64).mean()), "std": float(mel.astype(np.float64).std())})
    write_tensors(OUT / "log_mel.safetensors", tensors)
    write_compact(OUT / "log_mel.json", rows)


def make():
    warnings.simplefilter("ignore")
    print("preprocess", flush=True)
    make_images()
    make_resize()
    make_smart_resize()
    make_log_mel()
