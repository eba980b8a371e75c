"""Settings, counters and fingerprints of models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from triptych_ec import SettingError
from triptych_ec.metrics import COUNTERS, Counters
from triptych_ec.model import model_fingerprint
from triptych_ec.settings import ConnectorSettings


def settings_are_read_and_every_mistake_is_named_at_once(tmp_path) -> None:
    settings = ConnectorSettings.read({"store": f"disk:{tmp_path}", "peers": ["h:1"], "timeout_s": 2}, {})
    assert (settings.peers, settings.timeout_s, settings.patience_s) == (("h:1",), 2, 30.0)
    assert "peers" in settings.open().describe()
    wrong = {"stor": 1, "peers": ["h"], "timeout_s": 0, "n_threads": 1.5, "patience_s": True, "fingerprint": 3}
    with pytest.raises(SettingError) as e:
        ConnectorSettings.read(wrong, {})
    for text in ("`stor` is no setting; allowed are store, peers", "`store` is missing", *(f"`{k}`" for k in wrong)):
        assert text in str(e.value)


def keys_and_salt_come_from_outside_the_settings(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text("ab" * 32 + "\n" + "cd" * 32 + "\n")
    environment = {"TRIPTYCH_EC_MAC_KEYS": str(file), "TRIPTYCH_EC_TENANT_SALT": "s3cret"}
    settings = ConnectorSettings.read({"store": "disk:/x"}, environment)
    assert len(settings.mac_keys().keys) == 2 and settings.tenant_salt() == b"s3cret"
    assert "s3cret" not in repr(settings)
    for bad in (tmp_path / "none", tmp_path):
        with pytest.raises(SettingError, match="mac_keys_file"):
            ConnectorSettings.read({"store": "disk:/x", "mac_keys_file": str(bad)}, {}).mac_keys()
    file.write_text("\n")
    with pytest.raises(SettingError, match="has no key"):
        settings.mac_keys()


def the_fingerprint_holds_what_outputs_depend_on(tmp_path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1 << 20))

    def of(name: str = "", **changes) -> bytes:
        hf_config = SimpleNamespace(to_dict=lambda: {"hidden": changes.pop("hidden", 1), "_name_or_path": str(changes)})
        # Where vLLM keeps it: of `ModelConfig` it is an argument alone.
        multimodal = SimpleNamespace(mm_processor_kwargs=changes.pop("mm_processor_kwargs", None))
        values = {"model": str(tmp_path), "dtype": "bf16", "multimodal_config": multimodal, "quantization": None, **changes}
        return model_fingerprint(SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config, **values)), name)

    base = of()
    assert base == of()
    others = [of("named"), of(dtype="f16"), of(mm_processor_kwargs={"max_pixels": 9}), of(hidden=2), of(model="hub/id")]
    weights.write_bytes(bytes(500_000) + b"x" * 4096 + bytes((1 << 20) - 504_096))
    others.append(of())
    assert len({base, *others}) == 7
    assert of(model="hub/id", revision="a") != of(model="hub/id", revision="b")


def every_counter_is_rendered_and_deltas_add_up() -> None:
    worker, total = Counters(), Counters()
    worker.add("triptych_ec_loads_total", outcome="loaded")
    worker.add("triptych_ec_loaded_bytes_total", 10)
    total.merge(worker.take())
    assert worker.take() == {}
    worker.add("triptych_ec_loaded_bytes_total", 5)
    total.merge(worker.take())
    text = total.render()
    assert 'triptych_ec_loads_total{outcome="loaded"} 1\n' in text
    assert "triptych_ec_loaded_bytes_total 15\n" in text
    assert all(f"# TYPE {name} counter" in text for name in COUNTERS)
    for name, outcome in [("x", ""), ("triptych_ec_loads_total", ""), ("triptych_ec_loads_total", "x")]:
        with pytest.raises(KeyError):
            worker.add(name, outcome=outcome)
