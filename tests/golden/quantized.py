"""Layers of quantized checkpoints, and what they are dequantized to by the published formulas.

Every folder has a configuration, `model.safetensors` as quantizers write it, and `expected.safetensors` in f32. `t5_gptq`
has the weights of a whole model: of `t5_v1_1` of `text.py`, with each linear layer of its blocks as GPTQ stores it.

Formulas: DeepSeek-V3's `weight_dequant` (fp8), AutoGPTQ's and GPTQModel's `QuantLinear` (gptq, gptq_v2), AutoAWQ's
`dequantize_gemm` (awq), compressed-tensors' `unpack_from_int32` and `dequantize`.
"""

import shutil

import numpy as np
import torch
from safetensors.torch import load_file

from common import ROOT, generator, write_json, write_tensors

OUT = ROOT / "quantized"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
SHIFTS = 4 * np.arange(8, dtype=np.uint32)


def words(codes):
    """Codes `[..., 8 n]` of four bits as `[..., n]` int32, the first in the lowest bits."""
    grouped = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    return torch.from_numpy((grouped << SHIFTS).sum(-1, dtype=np.uint32).view(np.int32))


def awq_words(codes):
    return words(codes.reshape(*codes.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(codes.shape))


def draw(name, n_out, n_in, n_groups):
    """Codes `[out, in]`, and of each output and group a zero and a scale that fits f16."""
    rng = generator(31, name)
    codes, zeros = rng.integers(0, 16, (n_out, n_in)), rng.integers(0, 16, (n_out, n_groups))
    return codes, zeros, rng.uniform(0.01, 0.1, (n_out, n_groups)).astype(np.float16)


def affine(codes, zeros, scales, groups):
    """`(code - zero) * scale`, `groups` the group of each input."""
    values = (codes - zeros[:, groups]).astype(np.float32) * scales.astype(np.float32)[:, groups]
    return torch.from_numpy(values)


def transposed(x):
    return torch.from_numpy(np.ascontiguousarray(x.T))


def gptq_layer(name, drawn, groups, v2=False):
    codes, zeros, scales = drawn
    stored = zeros if v2 else (zeros - 1) % 16
    layer = {
        "qweight": words(codes).T,
        "qzeros": words(np.ascontiguousarray(stored.T)),
        "scales": transposed(scales),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return {f"{name}.{k}": v for k, v in layer.items()}, {f"{name}.weight": affine(codes, zeros, scales, groups)}


def gptq(v2):
    name = "gptq_v2" if v2 else "gptq"
    in_order, by_activation = np.arange(40) // 8, generator(32, name).permutation(np.arange(40) // 8)
    tensors, expected = {}, {}
    for layer, groups in (("in_order", in_order), ("desc_act", by_activation), ("no_g_idx", in_order)):
        stored, values = gptq_layer(layer, draw(name + layer, 24, 40, 5), groups, v2)
        tensors |= {k: v for k, v in stored.items() if k != "no_g_idx.g_idx"}
        expected |= values
    tensors["plain.weight"] = expected["plain.weight"] = torch.arange(6.0).reshape(2, 3)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": False}
    return config | {"checkpoint_format": name}, tensors, expected


def awq():
    codes, zeros, scales = draw("awq", 24, 40, 5)
    tensors = {
        "layer.qweight": awq_words(np.ascontiguousarray(codes.T)),
        "layer.qzeros": awq_words(np.ascontiguousarray(zeros.T)),
        "layer.scales": transposed(scales),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
    return config, tensors, {"layer.weight": affine(codes, zeros, scales, np.arange(40) // 8)}


def packed():
    """Groups, outputs, zeros, and widths that are no multiple of eight."""
    tensors, expected = {}, {}
    for name, n_out, n_in, n_groups in (("groups", 10, 32, 4), ("odd", 9, 21, 1), ("odd_groups", 9, 30, 3), ("zeros", 11, 24, 3)):
        codes, zeros, scales = draw("packed" + name, n_out, n_in, n_groups)
        if name == "zeros":
            padded = np.pad(zeros, ((0, -n_out % 8), (0, 0)), constant_values=0)
            tensors["zeros.weight_zero_point"] = words(np.ascontiguousarray(padded.T)).T
        else:
            zeros = np.full_like(zeros, 8)
        tensors |= {
            f"{name}.weight_packed": words(np.pad(codes, ((0, 0), (0, -n_in % 8)))),
            f"{name}.weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
            f"{name}.weight_shape": torch.tensor([n_out, n_in]),
        }
        wide = tensors[f"{name}.weight_scale"].float().numpy()
        expected[f"{name}.weight"] = affine(codes, zeros, wide, np.arange(n_in) // (n_in // n_groups))
    return compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}), tensors, expected


def compressed(form, weights):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    }


def fp8_codes(name, n_out, n_in):
    """Every byte that is a number, in turn."""
    numbers = np.array([b for b in range(256) if b & 0x7F != 0x7F], dtype=np.uint8)
    codes = np.resize(generator(33, name).permutation(numbers), (n_out, n_in))
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def blocks(codes, scales, block):
    """`weight_dequant`: every code times the scale of its block."""
    n_out, n_in = codes.shape
    wide = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:n_out, :n_in]
    return codes.float() * wide


def fp8_blocks(block, shapes):
    tensors, expected = {}, {}
    for i, (n_out, n_in) in enumerate(shapes):
        codes = fp8_codes(f"blocks{n_out}", n_out, n_in)
        n_scales = (-(-n_out // block[0]), -(-n_in // block[1]))
        scales = torch.from_numpy(generator(34, f"{n_out}").uniform(0.01, 0.1, n_scales).astype(np.float32))
        tensors |= {f"{i}.weight": codes, f"{i}.weight_scale_inv": scales}
        expected[f"{i}.weight"] = blocks(codes, scales, block)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block)}
    return config, tensors, expected


def fp8_tensor():
    codes, scale = fp8_codes("tensor", 5, 7), torch.tensor(0.03)
    tensors = {"layer.weight": codes, "layer.weight_scale": scale, "layer.input_scale": torch.tensor(0.5)}
    return {"quant_method": "fp8", "activation_scheme": "static"}, tensors, {"layer.weight": codes.float() * scale}


def bytes_by_scale(form, kind):
    """A scale for an output, for the tensor, for a group of inputs."""
    tensors, expected = {}, {}
    for name, n_scales in (("channel", (9, 1)), ("tensor", (1,)), ("group", (9, 3))):
        rng = generator(35, form + name)
        codes = fp8_codes(name, 9, 12) if kind == "float" else torch.from_numpy(rng.integers(-128, 128, (9, 12), dtype=np.int8))
        scale = torch.from_numpy(rng.uniform(0.01, 0.1, n_scales).astype(np.float32)).to(torch.bfloat16)
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
        wide = scale.float().repeat_interleave(4, 1) if name == "group" else scale.float()
        expected[f"{name}.weight"] = codes.float() * wide
    return compressed(form, {"num_bits": 8, "type": kind, "strategy": "channel"}), tensors, expected


def float_blocks():
    config, tensors, expected = fp8_blocks((8, 16), [(11, 20)])
    tensors["0.weight_scale"] = tensors.pop("0.weight_scale_inv")
    return compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 16]}), tensors, expected


def whole_model():
    """Each linear layer of a model by GPTQ's round-to-nearest, in groups of 16 by an order of its own."""
    source = ROOT / "t5_v1_1/model"
    stored = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith((".q.weight", ".k.weight", ".v.weight", ".o.weight", ".wi_0.weight", ".wi_1.weight", ".wo.weight")):
            stored[name] = weight
            continue
        weight, layer = weight.float().numpy(), name.removesuffix(".weight")
        n_in = weight.shape[1]
        groups = generator(36, name).permutation(np.arange(n_in) // 16)
        members = np.argsort(groups, kind="stable").reshape(-1, 16)
        low, high = weight[:, members].min(-1), weight[:, members].max(-1)
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, 15).astype(int)
        codes = np.clip(np.round(weight / scales.astype(np.float32)[:, groups]) + zeros[:, groups], 0, 15).astype(int)
        stored |= gptq_layer(layer, (codes, zeros, scales), groups)[0]
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}, stored, None


def make():
    print("quantized", flush=True)
    shutil.rmtree(OUT, ignore_errors=True)
    cases = {
        "fp8_blocks": fp8_blocks((128, 128), [(130, 9), (9, 130), (3, 4)]), "fp8_small_blocks": fp8_blocks((8, 16), [(19, 33)]),
        "fp8_tensor": fp8_tensor(), "float_scales": bytes_by_scale("float-quantized", "float"), "float_blocks": float_blocks(),
        "int8": bytes_by_scale("int-quantized", "int"), "packed": packed(),
        "gptq": gptq(False), "gptq_v2": gptq(True), "awq": awq(), "t5_gptq": whole_model(),
    }
    for name, (config, tensors, expected) in cases.items():
        write_json(OUT / name / "config.json", {"quantization_config": config})
        write_tensors(OUT / name / "model.safetensors", tensors)
        if expected:
            write_tensors(OUT / name / "expected.safetensors", expected)
