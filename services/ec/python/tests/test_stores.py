"""Every store: the contract, and the same formats as the Rust side's, in both directions."""

from __future__ import annotations

import threading
import time

import pytest
from blake3 import blake3
from conftest import Server, rust, rust_fails, start_redis, start_store
from samples import KINDS, fresh, sample

from triptych_ec import (
    MacKeys,
    ObjectError,
    SettingError,
    Store,
    StoreUnavailable,
    TooLarge,
    decode,
    encode,
    open_store,
)
from triptych_ec.items import DTYPE_BYTES
from triptych_ec.stores import Held, Lease
from triptych_ec.stores.peers import WithPeers

SECRET = "ab" * 32


@pytest.mark.parametrize("kind", KINDS)
def what_rust_writes_reads_here(setting: str, store: Store, kind: str) -> None:
    for dtype in DTYPE_BYTES:
        item, rows = sample(7, 6, dtype, kind)
        assert rust("write", setting, 7, 6, dtype, kind, SECRET) == item.key.hex()
        data = store.get(item.key)
        assert decode(data, item.key, MacKeys.parse(SECRET)) == (item, rows)
        assert data == encode(item, rows, MacKeys.parse(SECRET))
        assert store.head(item.key) == item


def what_is_written_here_reads_in_rust(setting: str, store: Store) -> None:
    for kind in KINDS:
        item, rows = sample(9, 6, "BF16", kind)
        assert store.put_if_absent(item.key, encode(item, rows, MacKeys.parse(SECRET)))
        printed = rust("read", setting, item.key.hex(), SECRET)
        assert printed.endswith(f"|BF16|{blake3(rows).hexdigest()}")
        assert "another key" in rust_fails("read", setting, item.key.hex(), "cd" * 32)


@pytest.mark.parametrize("n_bytes", [0, (1 << 20) - 400, 1 << 20, (5 << 20) + 24])
def objects_of_many_chunks_go_both_ways(setting: str, store: Store, n_bytes: int) -> None:
    n_tokens = n_bytes // 8
    there, _ = sample(n_tokens, 2, "F32", "image")
    rust("write", setting, n_tokens, 2, "F32", "image")
    assert decode(store.get(there.key), there.key)[0] == there
    item, rows = fresh(n_tokens, 2)
    assert store.put_if_absent(item.key, encode(item, rows))
    assert rust("read", setting, item.key.hex()).endswith(blake3(rows).hexdigest())
    assert store.get(item.key) == encode(item, rows)


def the_first_object_stays_until_it_is_removed(store: Store) -> None:
    item, rows = fresh()
    data = encode(item, rows)
    assert store.get(item.key) is None and store.head(item.key) is None
    assert store.put_if_absent(item.key, data)
    assert not store.put_if_absent(item.key, data + b"x")
    assert store.get(item.key) == data
    assert store.quarantine(item.key)
    assert not store.quarantine(item.key)
    assert store.get(item.key) is None
    assert store.put_if_absent(item.key, data)


def two_writers_of_a_key_have_one_winner(store: Store) -> None:
    item, rows = fresh(400_000, 1)
    data, won = encode(item, rows), []
    threads = [threading.Thread(target=lambda: won.append(store.put_if_absent(item.key, data))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 5 + [True]
    assert store.get(item.key) == data


def an_object_over_the_limit_is_refused_here(setting: str, store: Store) -> None:
    item, rows = fresh(1000, 4)
    small = open_store(setting, max_bytes=100)
    with pytest.raises(TooLarge):
        small.put_if_absent(item.key, encode(item, rows))
    store.put_if_absent(item.key, encode(item, rows))
    with pytest.raises(ObjectError):
        small.get(item.key)
    assert small.head(item.key) is None


def leases_have_one_holder_and_tokens_grow(store: Store) -> None:
    key = fresh()[0].key
    first = store.acquire(key, 30)
    assert isinstance(first, Lease) and store.is_leased(key)
    held = store.acquire(key, 30)
    assert isinstance(held, Held) and 0 < held.left_s <= 30
    assert store.renew(first, 30)
    assert store.release(first)
    assert not store.release(first) and not store.renew(first, 30) and not store.is_leased(key)
    second = store.acquire(key, 0.05)
    assert isinstance(second, Lease) and second.token > first.token
    assert not store.release(first)
    until = time.monotonic() + 10
    while isinstance(third := store.acquire(key, 30), Held):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert third.token > second.token and not store.release(second)


def a_wait_ends_when_the_object_is_stored_or_the_lease_is_free(store: Store) -> None:
    item, rows = fresh()
    assert store.wait(item.key, 20) is None, "nobody holds the lease"
    lease = store.acquire(item.key, 30)
    assert store.wait(item.key, 0.05) is None
    timer = threading.Timer(0.2, lambda: store.put_if_absent(item.key, encode(item, rows)))
    timer.start()
    assert store.wait(item.key, 20) == item
    store.release(lease)


@pytest.mark.parametrize("start, setting", [(start_redis, "redis://127.0.0.1:{}"), (start_store, "grpc://127.0.0.1:{}")])
def a_store_that_comes_back_is_used_again(start, setting: str) -> None:
    server = Server(start, setting)
    store = open_store(server.setting, timeout_s=1.0)
    item, rows = fresh()
    assert store.put_if_absent(item.key, encode(item, rows))
    server.kill()
    for call in (lambda: store.get(item.key), lambda: store.acquire(item.key, 1), lambda: store.head(item.key)):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            call()
        assert time.monotonic() - started < 5
    server.start()
    until = time.monotonic() + 20
    while True:
        try:
            assert store.get(item.key) is None, "it was in memory"
            break
        except StoreUnavailable:
            assert time.monotonic() < until
    assert store.put_if_absent(item.key, encode(item, rows))
    server.kill()


def a_chunk_that_is_gone_is_a_miss(redis_server: Server) -> None:
    import redis

    store, raw = open_store(redis_server.setting), redis.Redis(port=redis_server.port)
    item, rows = fresh(400_000, 1)
    store.put_if_absent(item.key, encode(item, rows))
    (chunk,) = raw.keys(f"triptych:ec:{{{item.key.hex()}}}:*:c1")
    raw.delete(chunk)
    assert store.get(item.key) is None
    assert raw.keys(f"triptych:ec:{{{item.key.hex()}}}*") == []
    assert store.put_if_absent(item.key, encode(item, rows))
    raw.set(f"triptych:ec:{{{item.key.hex()}}}", b"TEC1 rubbish")
    with pytest.raises(ObjectError):
        store.get(item.key)
    assert store.quarantine(item.key)
    raw.lpush(f"triptych:ec:{{{item.key.hex()}}}", b"x")
    with pytest.raises(ObjectError):
        store.get(item.key)
    assert store.head(item.key) is None and store.quarantine(item.key)


def a_chunk_of_another_length_is_no_part_of_an_object(redis_server: Server) -> None:
    import redis

    store, raw = open_store(redis_server.setting), redis.Redis(port=redis_server.port)
    item, rows = fresh(400_000, 1)
    store.put_if_absent(item.key, encode(item, rows))
    (chunk,) = raw.keys(f"triptych:ec:{{{item.key.hex()}}}:*:c0")
    raw.append(chunk, b"x")
    with pytest.raises(ObjectError, match="wrong length"):
        store.get(item.key)


def two_files_for_one_name_have_one_winner(tmp_path) -> None:
    from triptych_ec.stores.disk import _link

    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    assert _link(tmp_path / "a", tmp_path / "object") and not _link(tmp_path / "b", tmp_path / "object")
    assert (tmp_path / "object").read_text() == "a"


def objects_in_redis_expire(redis_server: Server) -> None:
    import redis

    store, raw = open_store(redis_server.setting + "?ttl_s=77"), redis.Redis(port=redis_server.port)
    item, rows = fresh()
    store.put_if_absent(item.key, encode(item, rows))
    names = raw.keys(f"triptych:ec:{{{item.key.hex()}}}*")
    assert sorted(raw.ttl(name) for name in names) == [77, 137]


def a_lost_object_is_read_from_a_peer(store_server: Server, tmp_path) -> None:
    item, rows = fresh()
    peer = open_store(store_server.setting)
    peer.put_if_absent(item.key, encode(item, rows))
    dead = open_store("grpc://127.0.0.1:1", timeout_s=0.5)
    store = WithPeers(open_store(f"disk:{tmp_path}"), [dead, peer])
    assert store.get(item.key) == encode(item, rows)
    assert store.head(item.key) == item
    assert store.quarantine(item.key), "the peer that gave it is skipped"
    assert store.get(item.key) is None
    assert peer.get(item.key) is not None


def settings_that_cannot_be_used_are_refused_without_their_password() -> None:
    wrong = ["", "memory", "s3://b", "disk:", "disk:/tmp/x?mib=4", "grpc://host", "grpc://h:99999", "grpc://u@h:1"]
    for text in [*wrong, "redis://:s3cret@h?ttl_s=0", "redis://:s3cret@h:notaport", "redis+cluster://u:s3cret@h:1"]:
        with pytest.raises(SettingError) as e:
            open_store(text)
        assert "s3cret" not in str(e.value), text
    assert open_store("redis://:s3cret@h:1/2").describe() == "redis://***@h:1"


def the_schema_is_that_of_the_proto_file() -> None:
    import re
    from pathlib import Path

    from triptych_ec.stores.schema import MESSAGES

    proto = (Path(__file__).parents[4] / "proto/triptych/v1/worker.proto").read_text()
    for name, fields in MESSAGES.items():
        scope = proto
        for part in name.split("."):
            start = re.search(rf"message {part} \{{", scope)
            assert start, name
            depth, end = 1, start.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(scope[end], 0)
                end += 1
            scope = scope[start.end() : end]
        for field, (number, kind) in fields.items():
            written = kind.replace(f"{name}.", "")
            assert re.search(rf"\b{re.escape(written)} {field} = {number};", scope), f"{name}.{field}"
