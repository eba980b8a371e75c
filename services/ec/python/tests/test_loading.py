"""The loader: what waits, what is loaded, what is encoded here, and what memory it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fakes import FakeStore, until_true
from samples import SAMPLE_ENCODER, fresh

from triptych_ec import EncodedItem, MacKeys, encode
from triptych_ec.expected import Expected
from triptych_ec.loading import Loader, LoadLimits, Status, Wanted
from triptych_ec.metrics import Counters

KEYS = MacKeys()


class Case:
    """A loader over a store in memory."""

    def __init__(self, patience_s: float = 20.0, budget_bytes: int = 1 << 20, keys: MacKeys = KEYS) -> None:
        self.store, self.counters = FakeStore(), Counters()
        limits = LoadLimits(patience_s=patience_s, budget_bytes=budget_bytes, max_object_bytes=1 << 20, n_threads=4)
        self.loader = Loader(self.store, self.counters, keys, limits)

    def put(self, n_tokens: int = 3) -> EncodedItem:
        item, rows = fresh(n_tokens)
        self.store.objects[item.key] = encode(item, rows)
        return item

    def settle(self, request: str, wanted: Wanted) -> Status:
        seen: list[Status] = []

        def is_settled() -> bool:
            seen.append(self.loader.poll(request, wanted))
            return seen[-1] is not Status.PENDING

        until_true(is_settled)
        return seen[-1]

    def n(self, outcome: str) -> int:
        return self.counters.get("triptych_ec_loads_total", outcome)


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    yield case
    case.loader.close()


def wanted(item: EncodedItem, can_encode: bool = False, **changes) -> Wanted:
    values = {"dtypes": frozenset({item.dtype}), "fingerprints": frozenset({SAMPLE_ENCODER}), **changes}
    expected = Expected(**({"n_tokens": item.n_tokens} | values))
    return Wanted(identifier=item.key.hex(), key=item.key, expected=expected, can_encode=can_encode)


def an_object_that_verifies_is_ready_and_stays_while_it_is_needed(case: Case) -> None:
    item = case.put()
    assert case.loader.poll("r", wanted(item)) is Status.PENDING
    assert case.settle("r", wanted(item)) is Status.READY
    loaded = case.loader.loaded(item.key.hex())
    assert loaded.item == item and loaded.data[loaded.offset :] == case.store.objects[item.key][loaded.offset :]
    case.store.objects.clear()
    assert case.loader.poll("r2", wanted(item)) is Status.READY
    assert (case.n("loaded"), case.store.n_gets) == (1, 1)


def a_missing_item_is_encoded_where_its_input_is_and_awaited_elsewhere(case: Case) -> None:
    item, rows = fresh()
    assert case.settle("here", wanted(item, can_encode=True)) is Status.ABSENT
    for _ in range(50):
        assert case.loader.poll("waits", wanted(item)) is Status.PENDING
    case.store.objects[item.key] = encode(item, rows)
    assert case.settle("waits", wanted(item)) is Status.READY


def an_item_that_another_encodes_is_awaited_although_its_input_is_here(case: Case) -> None:
    item, rows = fresh()
    case.store.acquire(item.key, 30)
    want = wanted(item, can_encode=True)
    until_true(lambda: case.loader.poll("r", want) is Status.PENDING and case.n("awaited") > 1)
    case.store.objects[item.key] = encode(item, rows)
    assert case.settle("r", want) is Status.READY


@pytest.mark.parametrize("can_encode", [True, False])
def what_a_dead_producer_left_ends_with_the_patience(can_encode: bool) -> None:
    case = Case(patience_s=0.3)
    item, _ = fresh()
    case.store.acquire(item.key, 300)
    assert case.settle("r", wanted(item, can_encode)) is Status.ABSENT
    assert case.n("awaited") > 1


def a_damaged_object_is_hidden_and_the_next_one_is_loaded(case: Case) -> None:
    item, rows = fresh()
    good = encode(item, rows)
    case.store.objects[item.key] = good[:-1] + bytes([good[-1] ^ 1])
    until_true(lambda: case.loader.poll("r", wanted(item)) is Status.PENDING and case.n("damaged") == 1)
    assert case.store.quarantined == [item.key]
    case.store.objects[item.key] = good
    assert case.settle("r", wanted(item)) is Status.READY


def an_object_without_the_clusters_signature_is_damaged() -> None:
    case = Case(keys=MacKeys.parse("ab" * 32))
    assert case.settle("r", wanted(case.put(), can_encode=True)) is Status.ABSENT
    assert case.n("damaged") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"n_tokens": 4},
        {"dtypes": frozenset({"F16", "BF16"})},
        {"fingerprints": frozenset({bytes(32)})},
        {"hidden": 8},
        {"grid": (1, 3, 1)},
        {"modality": "video"},
    ],
)
def an_object_of_another_shape_is_never_loaded_and_never_removed(case: Case, changes: dict) -> None:
    item = case.put()
    assert case.settle("r", wanted(item, **changes)) is Status.ABSENT
    assert case.n("mismatched") == 1 and item.key in case.store.objects
    case.loader.forget("r")
    assert case.settle("r2", wanted(item)) is Status.READY
    assert case.loader.poll("r3", wanted(item, **changes)) is Status.ABSENT


def a_store_that_is_away_delays_a_request_and_does_not_end_it(case: Case) -> None:
    item = case.put()
    case.store.is_down = True
    until_true(lambda: case.loader.poll("r", wanted(item)) is Status.PENDING and case.n("unreachable") > 2)
    assert case.settle("other", wanted(item, can_encode=True)) is Status.ABSENT
    case.store.is_down = False
    assert case.settle("r", wanted(item)) is Status.READY


def memory_is_bounded_and_the_oldest_request_goes_first() -> None:
    case = Case(budget_bytes=9000)
    items = [case.put(100) for _ in range(6)]
    assert case.settle("a", wanted(items[0])) is Status.READY
    for item in items[1:5]:
        assert case.settle("a", wanted(item)) is Status.READY
    assert case.loader.held_bytes() > 9000, "the oldest may exceed it"
    for _ in range(50):
        assert case.loader.poll("b", wanted(items[5])) is Status.PENDING
        time.sleep(0.002)
    assert case.store.n_gets == 5, "no read was started"
    case.loader.forget("a", items[0].key.hex())
    case.loader.forget("a")
    assert case.loader.held_bytes() <= 9000
    assert case.settle("b", wanted(items[5])) is Status.READY


def nothing_is_kept_of_requests_that_went_away(case: Case) -> None:
    case.store.delay_s = 0.05
    missing, there = fresh()[0], case.put()
    for item in (missing, there):
        case.loader.poll("r", wanted(item))
    case.loader.forget("r")
    until_true(lambda: case.n("missing") == 1 and case.n("loaded") == 1)
    until_true(lambda: set(case.loader._entries) == {there.key.hex()})
    assert not case.loader._order
