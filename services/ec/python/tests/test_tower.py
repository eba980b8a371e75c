"""The identity of a tower by its files: the same digests as the Rust side makes, and what is refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from triptych_ec import SettingError
from triptych_ec.tower import Tower, canonical

MODELS = Path(__file__).parents[4] / "tests/golden"


def rows_of_vllm_have_a_fingerprint_of_their_own() -> None:
    tower = Tower(*(bytes([n]) * 32 for n in (1, 2, 3)))
    # `services/core/src/tower.rs` has the same.
    assert tower.rows_of_vllm("image", "BF16").hex() == "36bbc594e7ef14c62e5e42f9001079b56e6a2020832b2af56d4c1adad5b30de3"
    assert len({tower.rows_of_vllm(*kind) for kind in (("image", "BF16"), ("image", "F32"), ("video", "BF16"))}) == 3


def the_texts_of_values_are_those_of_the_rust_side() -> None:
    # `services/models/src/model/tower.rs` has the same.
    text = """{"b": [1, -2, 1.0, 0.00392156862745098, 1e-06, 18446744073709551615],
        "a": {"ü\\n\\"\\u0001": null, "t": true}, "é": ""}"""
    assert canonical(json.loads(text)) == (
        '{"a":{"t":true,"ü\\n\\"\\u0001":null,},"b":[1,-2,f3f800000,f3b808081,f358637bd,18446744073709551615,],"é":"",}'
    )
    assert [canonical(value) for value in (1e300, -1e300, 1 << 64)] == ["f7f800000", "fff800000", "f5f800000"]


# `services/models/src/model/tower.rs` has the same.
GOLDEN = {
    "qwen2_vl_two_images": "31cfa0402cbdc12ce03324432b2fe9213506b6ab1185593193dfe5669bda6ea7",
    "qwen2_5_vl_window112": "2cdfa16b89ab70b7d6b8fbe6d63eb416a0ca764a80a9077f0bcb0b45d2ff0a1a",
    "qwen3_vl_one_level": "c2e111f021efdbdc001b9ce48e17c131847aaa8dbc8cc4adebf66dd552bf9a74",
}


@pytest.mark.parametrize("name", GOLDEN)
def the_digests_of_a_model_are_those_of_the_rust_side(name: str) -> None:
    assert Tower.read(MODELS / name / "model").rows_of_vllm("image", "BF16").hex() == GOLDEN[name]


def copy(directory: Path) -> Path:
    """A model of one tensor."""
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", "vision_config": {"depth": 1}}))
    (directory / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 100}))
    weights(directory / "model.safetensors", {"visual.w": [1.0], "model.w": [2.0]})
    return directory


def weights(path: Path, tensors: dict[str, list[float]]) -> None:
    """A safetensors file of f32."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def what_changes_rows_changes_the_part_it_belongs_to(tmp_path) -> None:
    one = Tower.read(copy(tmp_path))

    def changed() -> tuple[bool, bool, bool]:
        other = Tower.read(tmp_path)
        return one.configuration != other.configuration, one.processor != other.processor, one.weights != other.weights

    (tmp_path / "config.json").write_text('{ "vision_config": {"depth": 1}, "model_type": "qwen2_vl", "vocab_size": 3}')
    weights(tmp_path / "model.safetensors", {"visual.w": [1.0], "model.w": [9.0]})
    assert changed() == (False, False, False), "form, and what is no tower's, say nothing"
    weights(tmp_path / "model.safetensors", {"visual.w": [1.5]})
    assert changed() == (False, False, True)
    copy(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 200}')
    assert changed() == (False, True, False)
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"max_pixels": 100}}')
    assert changed() == (False, False, False), "the object wins"
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {"depth": 2}}')
    assert changed() == (True, False, False)


@pytest.mark.parametrize(
    "file, text, says",
    [
        ("config.json", '{"model_type": "llava"}', "'llava'; allowed are qwen2_vl, qwen2_5_vl"),
        ("config.json", '{"model_type": "qwen2_vl"}', "vision_config"),
        ("config.json", '{"model_type": "qwen2_vl", "vision_config": {}, "quantization_config": {"a": 1}}', "quantiz"),
        ("config.json", "[]", "config.json is no JSON object"),
        ("preprocessor_config.json", "{", "preprocessor_config.json cannot be read"),
        ("processor_config.json", '{"image_processor": 3}', "`image_processor`"),
        ("model.safetensors", "", "no safetensors file"),
        ("model.safetensors", "\xff" * 8, "its header has"),
        ("model.safetensors", "\x02\0\0\0\0\0\0\0{}", "visual. or model.visual."),
        ("model.safetensors", '\x12\0\0\0\0\0\0\0{"visual.w":  {} }', "tensor visual.w"),
        ("model.safetensors", "\x02\0\0\0\0\0\0\0[]", "no safetensors file"),
    ],
)
def no_tower_is_made_of_files_that_are_not_whole(tmp_path, file: str, text: str, says: str) -> None:
    copy(tmp_path)
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingError, match=says):
        Tower.read(tmp_path)
