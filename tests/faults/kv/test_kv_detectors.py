"""The KV fault matrix can fail: with a protection switched off, damage reaches pages and tokens.

Without verification, or with blocks released too early, foreign bytes reach the pages and the ids
are wrong. A row of the matrix fails if its fault has no effect. So a passing matrix is evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from baton_decode_node.fetch_state import FetchState, FetchTransition
from baton_engine.core.engine_core import EngineCore
from baton_kvstore.data import transfers
from baton_protocol.link import RunJob
from baton_protocol.request import Request
from tests.faults.kv.cells import (
    Action,
    all_of,
    fetching,
    lost,
    nothing_fetched,
    publishing,
    some_lost,
    some_refused,
    some_unmarked,
    stored,
)
from tests.faults.kv.races import TIGHT, Tally, destination_race, source_race
from tests.faults.kv.values import FIRST, SHARDED, change, flip, one_not_found, swap
from tests.support.kv_faults.store_servers import KVServers
from tests.support.kv_faults.testbed import CHUNKS, OTHER, OUTPUTS, SMALL, TARGET, KVTestbed

ROUNDS = 60  # at most: the first round with a wrong byte ends the race
TURNS = 600  # at most, until the other request runs; without holds it runs at once


@pytest.fixture(scope="module")
def running_servers() -> Iterator[KVServers]:
    servers = KVServers()
    servers.start()
    yield servers
    servers.stop()


@pytest.fixture
def servers(running_servers: KVServers) -> Iterator[KVServers]:
    yield running_servers
    running_servers.reset()


@pytest.fixture
def no_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every received value passes verification."""
    monkeypatch.setattr(transfers, "verify_value", lambda *value_and_spec: "")


# --- verification ---------------------------------------------------------------------------------


def copy_foreign_value(testbed: KVTestbed) -> None:
    """Copy the value of another prompt's chunk to the key of this prompt's chunk."""
    other = testbed.make_request("other", OTHER)
    testbed.publish(other)
    testbed.overwrite(testbed.key(TARGET), testbed.value(testbed.key(TARGET, 0, other)))


def swap_values(testbed: KVTestbed) -> None:
    other = testbed.make_request("other", OTHER)
    testbed.publish(other)
    swap(lambda s: [(s.key(TARGET), s.key(TARGET, 0, other))])(testbed)


def run_request(testbed: KVTestbed, inject: Action) -> tuple[list[int], list[int]]:
    """Run a request after the fault. Return its node's wrong pages and the generated ids."""
    testbed.publish()
    node = testbed.node("d0")
    inject(testbed)
    node.take(RunJob(testbed.request))
    testbed.spin(lambda: len(node.ids(testbed.request.id)) == OUTPUTS, "the request's end")
    testbed.settle()
    assert (node.fetched(), node.lost()) == (CHUNKS, [])
    return testbed.wrong_pages("d0"), node.ids(testbed.request.id)


@pytest.mark.parametrize(
    ("inject", "wrong"),
    [
        pytest.param(copy_foreign_value, [TARGET], id="foreign"),
        pytest.param(swap_values, [TARGET], id="swapped across prompts"),
        pytest.param(change(lambda value: value[: len(value) // 2]), [TARGET], id="truncated"),
        pytest.param(
            swap(lambda testbed: [(testbed.key(3), testbed.key(7))]), [3, 7], id="swapped within"
        ),
        pytest.param(change(flip(FIRST)), [TARGET], id="first byte"),
        pytest.param(change(flip(-1, 3)), [TARGET], id="last byte"),
    ],
)
@pytest.mark.usefixtures("no_verification")
def test_without_verification_damaged_values_reach_the_pages_and_change_the_ids(
    inject: Action, wrong: list[int], servers: KVServers
) -> None:
    with KVTestbed(SMALL, servers) as testbed:
        pages, ids = run_request(testbed, inject)
        assert pages == wrong
        assert ids != testbed.expected_ids(testbed.request)


@pytest.mark.usefixtures("no_verification")
def test_without_verification_swapped_shards_reach_the_pages_and_change_the_ids(
    servers: KVServers,
) -> None:
    with KVTestbed(SHARDED, servers) as testbed:
        pages, ids = run_request(testbed, swap(lambda s: [(s.key(TARGET, 0), s.key(TARGET, 1))]))
        assert pages == [TARGET]
        assert ids != testbed.expected_ids(testbed.request)


def test_without_verification_a_damaged_header_alone_changes_no_page(
    no_verification: None, servers: KVServers
) -> None:
    with KVTestbed(SMALL, servers) as testbed:
        pages, ids = run_request(testbed, change(flip(0)))
        assert (pages, ids) == ([], testbed.expected_ids(testbed.request))


# --- holds ----------------------------------------------------------------------------------------


def test_pages_released_before_their_fetch_has_settled_are_overwritten(
    servers: KVServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = FetchState._advance

    def advance_early(state: FetchState) -> FetchTransition:
        return advance(replace(state, flying=0) if state.aborted else state)

    monkeypatch.setattr(FetchState, "_advance", advance_early)
    tally = raced(servers, destination_race)
    assert tally.early > 0
    assert tally.wrong > 0


def test_pages_that_are_not_held_for_a_put_are_stored_with_foreign_bytes(
    servers: KVServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "hold", lambda engine, blocks: None)
    monkeypatch.setattr(EngineCore, "unhold", lambda engine, blocks: None)
    tally = raced(servers, source_race)
    assert tally.early > 0
    assert tally.wrong > 0


def raced(servers: KVServers, race: Callable[[KVTestbed, int, int], Tally]) -> Tally:
    with KVTestbed(TIGHT, servers) as testbed:
        return race(testbed, ROUNDS, TURNS)


# --- the matrix itself ----------------------------------------------------------------------------


def no_fault(testbed: KVTestbed) -> None:
    """Inject nothing."""


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(stored(no_fault, lost(1, "corrupt")), id="lost"),
        pytest.param(stored(no_fault, nothing_fetched), id="nothing fetched"),
        pytest.param(stored(no_fault, one_not_found), id="one not found"),
        pytest.param(fetching(no_fault, some_lost), id="some lost"),
        pytest.param(publishing(no_fault, some_refused), id="some refused"),
        pytest.param(publishing(no_fault, some_unmarked, server="index"), id="some unmarked"),
    ],
)
def test_a_row_whose_fault_has_no_effect_fails(run: Action, servers: KVServers) -> None:
    with KVTestbed(SMALL, servers, limit_s=1.0) as testbed, pytest.raises(AssertionError):
        run(testbed)


def test_a_row_whose_tokens_are_wrong_fails(servers: KVServers) -> None:
    def expect_other_ids(testbed: KVTestbed) -> None:
        expected_ids = testbed.expected_ids

        def wrong(request: Request) -> list[int]:
            return expected_ids(request)[::-1]

        testbed.expected_ids = wrong  # type: ignore[method-assign]

    run = stored(expect_other_ids, all_of())
    with KVTestbed(SMALL, servers) as testbed, pytest.raises(AssertionError, match="other tokens"):
        run(testbed)


def test_a_row_that_hangs_fails(servers: KVServers) -> None:
    def run(testbed: KVTestbed) -> None:
        testbed.publish()
        testbed.node("d0")
        testbed.inject(lambda s: s.link("d0", "data0").hold())
        testbed.injected_at -= 60.0
        testbed.run("d0")

    with KVTestbed(SMALL, servers) as testbed, pytest.raises(AssertionError, match="waited"):
        run(testbed)
