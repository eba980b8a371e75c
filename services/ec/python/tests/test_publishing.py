"""Claims and the publisher: one encoder for an item, outputs that are stored although the store was away, bounds."""

from __future__ import annotations

import time

from blake3 import blake3
from fakes import FakeStore, until_true
from samples import fresh

from triptych_ec import MacKeys, decode, encode
from triptych_ec.metrics import Counters
from triptych_ec.publishing import Claims, Publication, Publisher, PublishLimits, Settled


def publisher(store: FakeStore, counters: Counters, queue_bytes: int = 1 << 20, patience_s: float = 20.0) -> Publisher:
    limits = PublishLimits(queue_bytes=queue_bytes, patience_s=patience_s, lease_ttl_s=30)
    return Publisher(store, counters, MacKeys.parse("ab" * 32), limits)


def n(counters: Counters, outcome: str) -> int:
    return counters.get("triptych_ec_publishes_total", outcome)


def settle(claims: Claims, request: str, key: bytes) -> Settled:
    seen = []
    until_true(lambda: seen.append(claims.settle(request, key)) or seen[-1] is not Settled.PENDING)
    return seen[-1]


def an_output_is_stored_signed_and_its_lease_released() -> None:
    store, counters = FakeStore(), Counters()
    item, rows = fresh()
    lease = store.acquire(item.key, 30)
    queue = publisher(store, counters)
    assert queue.publish(Publication(item, rows, lease))
    assert queue.flush(10)
    assert decode(store.objects[item.key], item.key, MacKeys.parse("ab" * 32)) == (item, rows)
    assert not store.leases and n(counters, "stored") == 1
    assert queue.publish(Publication(item, rows, None)) and queue.flush(10)
    assert n(counters, "already_there") == 1
    queue.close(1)


def an_output_is_stored_when_the_store_comes_back() -> None:
    store, counters = FakeStore(), Counters()
    item, rows = fresh()
    store.is_down = True
    queue = publisher(store, counters)
    queue.publish(Publication(item, rows, None))
    assert not queue.flush(0.2)
    store.is_down = False
    assert queue.flush(10) and item.key in store.objects
    queue.close(1)


def an_output_beyond_the_memory_is_dropped_and_one_is_always_taken() -> None:
    store, counters = FakeStore(), Counters()
    store.is_down = True
    queue = publisher(store, counters, queue_bytes=10, patience_s=0.2)
    (first, rows), (second, other) = fresh(), fresh()
    assert queue.publish(Publication(first, rows, None))
    assert not queue.publish(Publication(second, other, None))
    assert queue.flush(10)
    assert (n(counters, "dropped"), n(counters, "failed")) == (1, 1)
    queue.close(1)
    assert not queue.publish(Publication(second, other, None))


def rows_of_another_length_are_refused_and_the_queue_goes_on() -> None:
    store, counters = FakeStore(), Counters()
    queue = publisher(store, counters)
    (item, rows), (good, good_rows) = fresh(), fresh()
    queue.publish(Publication(item, rows[:-1], store.acquire(item.key, 30)))
    queue.publish(Publication(good, good_rows, None))
    assert queue.flush(10)
    assert (n(counters, "refused"), n(counters, "stored")) == (1, 1) and not store.leases
    queue.close(1)


def the_lease_of_an_item_has_one_claimant_who_keeps_it() -> None:
    store, key = FakeStore(), blake3(b"k").digest()
    ours, theirs = Claims(store, 0.3), Claims(store, 0.3)
    assert settle(ours, "a", key) is Settled.OURS
    assert settle(ours, "b", key) is Settled.OURS, "requests of one instance share it"
    assert settle(theirs, "c", key) is Settled.HELD
    start = time.monotonic()
    while time.monotonic() - start < 0.6:
        assert ours.settle("a", key) is Settled.OURS
        time.sleep(0.02)
    assert settle(theirs, "c", key) is Settled.HELD, "it was renewed"
    ours.forget("a")
    assert key in store.leases
    ours.forget("b")
    until_true(lambda: not store.leases)
    assert settle(theirs, "c", key) is Settled.OURS
    lease = theirs.hand_over(key)
    assert lease is not None and theirs.hand_over(key) is None
    theirs.forget("c")
    assert store.release(lease), "what was handed over is the worker's"


def a_store_that_is_away_does_not_keep_an_item_from_being_encoded() -> None:
    store, key = FakeStore(), blake3(b"k").digest()
    store.is_down = True
    claims = Claims(store, 30)
    assert settle(claims, "a", key) is Settled.OURS
    assert claims.hand_over(key) is None


def an_object_that_was_stored_before_the_grant_is_not_encoded_again() -> None:
    store, (item, rows) = FakeStore(), fresh()
    store.objects[item.key] = encode(item, rows)
    claims = Claims(store, 30)
    assert settle(claims, "a", item.key) is Settled.HELD
    assert not store.leases
