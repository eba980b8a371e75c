"""Files of `torch.save`: the weights of two cases of other makers, and small ones that show what such a file may hold.

The cases' tensors are read back by torch as they are in `model.safetensors`; `odd.json` has the elements of `odd.bin`.
"""

from collections import OrderedDict

import torch
from safetensors.torch import load_file

from common import ROOT, write_json

OUT = ROOT / "pickled"
INDEX = "pytorch_model.bin.index.json"


class Loader:
    """An object whose pickle would call a function when it is read."""

    def __reduce__(self):
        return (print, ("run",))


def odd():
    """Tensors that do not lie in their order, that share a storage, of every element type, of no dimension, of none."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    ramp = torch.arange(-3, 3)
    return OrderedDict([
        ("plain", base),
        ("transposed", base.t()),
        ("rows", base[1:3]),
        ("columns", base[:, 2:5]),
        ("every_other", base[::2, ::3]),
        ("permuted", torch.arange(24, dtype=torch.float16).reshape(2, 3, 4).permute(2, 0, 1)),
        ("one_column", base[:, 1:2]),
        ("repeated_few", base[0, :1].expand(5)),
        ("channels_last", torch.arange(36, dtype=torch.float32).reshape(1, 3, 3, 4).to(memory_format=torch.channels_last)),
        ("parameter", torch.nn.Parameter(torch.tensor([0.5, -1.5]))),
        ("scalar", torch.tensor(7.25)),
        ("none", torch.zeros(0, 3)),
        ("bf16", ramp.to(torch.bfloat16) / 4),
        ("f64", ramp.to(torch.float64) / 3),
        ("i8", ramp.to(torch.int8)), ("u8", ramp.abs().to(torch.uint8)), ("i16", ramp.to(torch.int16) * 300),
        ("i32", ramp.to(torch.int32) * 70000), ("i64", ramp * 2**40), ("bool", ramp > 0),
    ])


def make():
    print("pickled", flush=True)
    OUT.mkdir(exist_ok=True)
    torch.save(load_file(ROOT / "t5_odd_heads/model/model.safetensors"), OUT / "pytorch_model.bin")

    shards = OUT / "shards"
    shards.mkdir(exist_ok=True)
    state = load_file(ROOT / "pegasus_odd_heads/model/model.safetensors")
    names, weight_map = sorted(state), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save(OrderedDict((n, torch.nn.Parameter(state[n])) for n in part), shards / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(shards / INDEX, {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))})

    tensors = odd()
    torch.save(tensors, OUT / "odd.bin")
    torch.save({"fp8": torch.zeros(4).to(torch.float8_e4m3fn)}, OUT / "fp8.bin")
    torch.save({"sparse": torch.eye(3).to_sparse()}, OUT / "sparse.bin")
    torch.save({"state_dict": {"plain": tensors["plain"]}}, OUT / "nested.bin")
    torch.save({"plain": tensors["plain"], "loader": Loader()}, OUT / "call.bin")
    # Repeated beyond what the storage has: as little in the file, and as much in memory, as somebody likes.
    torch.save({"repeated": torch.zeros(1).expand(2**40)}, OUT / "repeated.bin")
    # One tensor alone, as clients send rows of an encoder output and their grid; the rows do not lie in their order.
    torch.save(torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T, OUT / "rows.bin")
    torch.save(torch.tensor([[1, 2, 2]]), OUT / "grid.bin")
    read = torch.load(OUT / "odd.bin", weights_only=True)
    assert all(torch.equal(read[n], t) and read[n].stride() == t.stride() for n, t in tensors.items())
    listed = {n: {"shape": list(t.shape), "values": t.detach().double().flatten().tolist()} for n, t in tensors.items()}
    write_json(OUT / "odd.json", listed)
