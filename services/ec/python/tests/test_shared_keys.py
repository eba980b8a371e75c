"""Objects of Triptych's own encoders under the names that its proxy gives items: who may use them, and what must fit."""

from __future__ import annotations

import subprocess

import pytest
import torch
from conftest import Server, rust, start_store
from samples import SAMPLE_ENCODER, sample
from test_connector import MODEL, Instance, request, rows

from triptych_ec import SettingError, decode, encode, open_store, proxy_identifier, proxy_key
from triptych_ec.extents import Grid
from triptych_ec.items import EncodedItem
from triptych_ec.loading import LoadedObject
from triptych_ec.objects import seal
from triptych_ec.settings import ConnectorSettings
from triptych_ec.stores import Lease
from triptych_ec.stores.tls import TlsFiles
from triptych_ec.tensors import tensor_of
from triptych_ec.tower import Tower

GRID = (1, 2, 6)
"""The patches of the sample image with three rows."""


def stored(setting: str, dtype: str) -> str:
    """The identifier of the sample image of three rows, 8 wide, which the Rust end stores."""
    key = bytes.fromhex(rust("write", setting, 3, 8, dtype, "image"))
    assert key == sample(3, 8, dtype, "image")[0].key
    return proxy_identifier(key)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def an_object_of_a_triptych_encoder_is_loaded_in_the_models_type(setting: str, tmp_path, dtype: str) -> None:
    name = stored(setting, dtype)
    consumer = Instance(tmp_path, "ec_consumer", store=setting, accept_proxy_keys=True)
    assert consumer.step(request("a", name, has_input=False, grid=GRID), rows) == []
    stored_type = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    expected = torch.frombuffer(bytearray(sample(3, 8, dtype, "image")[1]), dtype=stored_type).view(3, 8)
    loaded = consumer.cache[name]
    assert loaded.dtype is torch.bfloat16
    assert torch.equal(loaded.view(torch.int16), expected.to(torch.bfloat16).view(torch.int16))
    assert consumer.n("loads", "loaded") == 1


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def rows_of_eight_bits_are_multiplied_by_their_scales(dtype: str) -> None:
    scales = torch.tensor([0.5, 3.0])
    codes = torch.tensor([[-127, 0, 1, 127], [2, -3, 56, 8]], dtype=torch.int8)
    if dtype == "F8_E4M3":
        codes = codes.to(torch.float8_e4m3fn)
    raw = scales.view(torch.uint8).numpy().tobytes() + codes.view(torch.uint8).numpy().tobytes()
    item = seal(EncodedItem(bytes(32), bytes(32), "image", 2, 4, dtype, Grid(1, 2, 4), bytes(32)), raw)
    data = encode(item, raw)
    loaded = LoadedObject(item, data, len(data) - len(decode(data, item.key)[1]))
    expected = codes.to(torch.float32) * scales[:, None]
    assert torch.equal(tensor_of(loaded, "cpu"), expected)
    assert torch.equal(tensor_of(loaded, "cpu", torch.bfloat16), expected.to(torch.bfloat16))


def a_name_is_no_key_unless_the_operator_says_so(tmp_path) -> None:
    name = stored(f"disk:{tmp_path}", "BF16")
    trusting, other = ({"accept_proxy_keys": True, "patience_s": 0.2}, {"patience_s": 0.2})
    assert not Instance(tmp_path, "ec_consumer", **other).wait(request("a", name, has_input=False, grid=GRID))
    for wrong in (name.upper(), name + "0", name[:-1], name.replace("triptych-", ""), f"x{name}"):
        consumer = Instance(tmp_path, "ec_consumer", **trusting)
        assert proxy_key(wrong) is None and not consumer.wait(request("a", wrong, has_input=False, grid=GRID))


@pytest.mark.parametrize(
    "settings, asked",
    [
        ({"proxy_fingerprints": ["ab" * 32]}, {}),
        ({"n_levels": 1}, {"n_tokens": 4}),
        ({}, {"n_tokens": 4}),
        ({}, {"grid": (1, 6, 2)}),
    ],
)
def an_object_that_does_not_fit_ends_the_request_and_stays(tmp_path, settings: dict, asked: dict) -> None:
    name = stored(f"disk:{tmp_path}", "BF16")
    consumer = Instance(tmp_path, "ec_consumer", accept_proxy_keys=True, patience_s=600, **settings)
    assert not consumer.wait(request("a", name, has_input=False, **({"grid": GRID} | asked)))
    assert consumer.n("loads", "mismatched") == 1 and list(tmp_path.glob("??/*"))
    assert consumer.wait(request("b", name, has_input=True, **({"grid": GRID} | asked))), "with its pixels it is encoded"
    assert not consumer.scheduler.has_cache_item(name)


def rows_with_levels_are_as_wide_as_all_of_them(tmp_path) -> None:
    name = stored(f"disk:{tmp_path}", "BF16")
    asked = request("a", name, has_input=False, grid=GRID)
    named = {"accept_proxy_keys": True, "proxy_fingerprints": [SAMPLE_ENCODER.hex()]}
    assert Instance(tmp_path, "ec_consumer", n_levels=3, **named).step(asked, rows) == []
    narrow = Instance(tmp_path, "ec_consumer", **named)
    narrow.scheduler._vllm_config.model_config.get_hidden_size = lambda: 4
    assert not narrow.wait(asked)


def an_object_that_comes_late_is_awaited_and_one_that_never_comes_ends_the_request(tmp_path) -> None:
    item, raw = sample(3, 8, "BF16", "image")
    asked = request("a", proxy_identifier(item.key), has_input=False, grid=GRID)
    consumer = Instance(tmp_path, "ec_consumer", accept_proxy_keys=True, patience_s=20)
    for _ in range(50):
        assert not consumer.scheduler.ensure_cache_available(asked, 0)
    assert consumer.scheduler.take_unavailable_requests() == set()
    open_store(f"disk:{tmp_path}").put_if_absent(item.key, encode(item, raw))
    assert consumer.wait(asked)
    hasty = Instance(tmp_path / "empty", "ec_consumer", accept_proxy_keys=True, patience_s=0.2)
    assert not hasty.wait(asked)
    assert hasty.scheduler.counters.get("triptych_ec_unavailable_requests_total") == 1


def only_an_encoder_of_the_proxy_publishes_under_its_keys(tmp_path) -> None:
    item, _ = sample(3, 8, "BF16", "image")
    name = proxy_identifier(item.key)
    both = Instance(tmp_path, "ec_both", accept_proxy_keys=True)
    assert both.step(request("a", name, grid=GRID), rows) == [name]
    assert not list(tmp_path.glob("??/*")), "its key may be that of a Triptych encoder's rows"
    encoder = Instance(tmp_path, "ec_producer", accept_proxy_keys=True)
    assert encoder.step(request("a", name, grid=GRID), rows) == [name]
    head = open_store(f"disk:{tmp_path}").head(item.key)
    assert head.extent == Grid(*GRID) and head.fingerprint == Tower.read(MODEL).rows_of_vllm("image", "BF16")
    consumer = Instance(tmp_path, "ec_consumer", accept_proxy_keys=True, proxy_fingerprints=[head.fingerprint.hex()])
    assert consumer.step(request("b", name, has_input=False, grid=GRID), rows) == []
    assert torch.equal(consumer.cache[name], rows(name))


def an_encoder_of_the_proxy_neither_waits_for_its_lease_nor_for_what_it_says_is_lost(tmp_path) -> None:
    item, _ = sample(3, 8, "BF16", "image")
    name = proxy_identifier(item.key)
    store = open_store(f"disk:{tmp_path}")
    assert isinstance(store.acquire(item.key, 60), Lease), "the proxy holds it"
    encoder = Instance(tmp_path, "ec_producer", accept_proxy_keys=True)
    asked = request("a", name, grid=GRID)
    assert encoder.scheduler.ensure_cache_available(asked, 0), "at once"
    assert encoder.step(asked, rows) == [name]
    encoder.scheduler._scheduler.finished(request("a"))
    for again in ("b", "c"):
        (file,) = tmp_path.glob("??/*.safetensors")
        file.unlink()
        assert encoder.step(request(again, name, grid=GRID), rows) == [], "it is in the engine's cache"
        assert store.head(item.key) is not None
    assert encoder.step(request("d", name, grid=GRID), rows) == []
    assert encoder.n("publishes", "already_there") == 1 and encoder.n("publishes", "stored") == 3
    file.unlink()
    encoder.cache.clear()
    assert encoder.step(request("e", name, grid=GRID), rows, freed=(name,)) == [name]
    assert store.head(item.key) is not None


def settings_of_shared_keys_and_tls_are_checked(tmp_path) -> None:
    wrong = {"store": "disk:/x", "accept_proxy_keys": 1, "proxy_fingerprints": ["AB" * 32]}
    with pytest.raises(SettingError) as e:
        ConnectorSettings.read(wrong, {})
    assert "`accept_proxy_keys` is true or false" in str(e.value) and "64 hex digits" in str(e.value)

    def tls(environment: dict, **settings) -> TlsFiles | None:
        return ConnectorSettings.read({"store": "grpc://h:1", **settings}, environment).tls()

    assert tls({}) is None
    assert tls({"TRIPTYCH_TLS_CA": "ca", "TRIPTYCH_TLS_SERVER_NAME": "n"}, tls_cert_file="c") == TlsFiles("ca", "c", "", "n")
    with pytest.raises(SettingError, match="`tls_ca_file` is missing"):
        tls({}, tls_cert_file="c")
    (tmp_path / "ca").write_text("no certificate")
    for files, text in [(("ca", "c"), "given together"), (("none",), "tls_ca_file"), (("ca",), "no PEM")]:
        with pytest.raises(SettingError, match=text):
            TlsFiles(str(tmp_path / files[0]), *files[1:]).credentials()


def a_store_behind_tls_is_used_by_who_has_a_certificate_of_its_ca(tmp_path) -> None:
    certificates(tmp_path)
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "part.pem", "part.key"))

    def start(port: int) -> list[str]:
        flags = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca]
        return [word for word in start_store(port) if word != "--insecure-plaintext"] + flags

    server = Server(start, "grpc://localhost:{}")
    item, raw = sample(3, 8, "BF16", "image")
    store = open_store(server.setting, tls=TlsFiles(ca, cert, key))
    assert store.put_if_absent(item.key, encode(item, raw)) and store.head(item.key) == item
    by_address = open_store(server.setting.replace("localhost", "127.0.0.1"), tls=TlsFiles(ca, cert, key, "localhost"))
    assert by_address.get(item.key) == encode(item, raw)
    for stranger in (None, TlsFiles(ca), TlsFiles(ca, cert, key, "elsewhere")):
        with pytest.raises(Exception, match="UNAVAILABLE|DEADLINE"):
            open_store(server.setting, tls=stranger, timeout_s=2).get(item.key)
    server.kill()


def certificates(directory) -> None:
    """A CA, and a certificate of it for localhost."""

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], check=True, capture_output=True, cwd=directory)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA", "-days", "2")
    openssl("req", *curve, "-keyout", "part.key", "-out", "part.csr", "-subj", "/CN=part")
    usage = "subjectAltName=DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=critical,CA:FALSE\n"
    (directory / "usage").write_text(usage)
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "usage"]
    openssl("x509", "-req", "-in", "part.csr", *signed, "-out", "part.pem")
