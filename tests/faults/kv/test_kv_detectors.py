"""The detectors of the KV exchange fire: without each of them, damage goes where it must not.

Verification is switched off, holds are not held, faults are left out; then foreign bytes reach the
pages and wrong ids appear, and a row of the matrix whose fault did not happen fails. So the silence
of the matrix means something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from baton_decode_node.fetch_state import FetchState, Outcome
from baton_engine.core.engine_core import EngineCore
from baton_kvstore.data import transfers
from baton_protocol.link import RunJob
from baton_protocol.request import Request
from tests.faults.kv.cells import (
    Act,
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
from tests.faults.kv.values import FIRST, HIT, SHARDED, change, flip, one_not_found, swap
from tests.support.kv_faults.stage import CHUNKS, OTHER, OUTPUTS, SMALL, Stage
from tests.support.kv_faults.store_servers import KVServers

ROUNDS = 60  # at most: the first with a wrong byte ends the race
TURNS = 600  # at most, for the other request to run, which without holds it does at once


@pytest.fixture(scope="module")
def running() -> Iterator[KVServers]:
    made = KVServers()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def servers(running: KVServers) -> Iterator[KVServers]:
    yield running
    running.reset()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value is taken for what was asked for."""
    monkeypatch.setattr(transfers, "verify_value", lambda *value_and_spec: "")


# --- verification ---------------------------------------------------------------------------------


def foreign(stage: Stage) -> None:
    """Another prompt's chunk under this one's name; the other prompt is not asked for."""
    other = stage.ask("other", OTHER)
    stage.publish(other)
    stage.overwrite(stage.key(HIT), stage.value(stage.key(HIT, 0, other)))


def exchanged(stage: Stage) -> None:
    other = stage.ask("other", OTHER)
    stage.publish(other)
    swap(lambda s: [(s.key(HIT), s.key(HIT, 0, other))])(stage)


def run_blindly(stage: Stage, strike: Act) -> tuple[list[int], list[int]]:
    """Which pages of the node that fetched are wrong, and the ids it says."""
    stage.publish()
    node = stage.node("d0")
    strike(stage)
    node.take(RunJob(stage.request))
    stage.spin(lambda: len(node.ids(stage.request.id)) == OUTPUTS, "the request's end")
    stage.settle()
    assert (node.fetched(), node.lost()) == (CHUNKS, [])
    return stage.wrong_pages("d0"), node.ids(stage.request.id)


@pytest.mark.parametrize(
    ("strike", "wrong"),
    [
        pytest.param(foreign, [HIT], id="foreign"),
        pytest.param(exchanged, [HIT], id="swapped across prompts"),
        pytest.param(change(lambda value: value[: len(value) // 2]), [HIT], id="truncated"),
        pytest.param(
            swap(lambda stage: [(stage.key(3), stage.key(7))]), [3, 7], id="swapped within"
        ),
        pytest.param(change(flip(FIRST)), [HIT], id="first byte"),
        pytest.param(change(flip(-1, 3)), [HIT], id="last byte"),
    ],
)
@pytest.mark.usefixtures("blind")
def test_without_verification_damage_reaches_the_pages_and_wrong_ids_appear(
    strike: Act, wrong: list[int], servers: KVServers
) -> None:
    with Stage(SMALL, servers) as stage:
        pages, ids = run_blindly(stage, strike)
        assert pages == wrong
        assert ids != stage.truth(stage.request)


@pytest.mark.usefixtures("blind")
def test_without_verification_shards_that_changed_places_reach_the_pages(
    servers: KVServers,
) -> None:
    with Stage(SHARDED, servers) as stage:
        pages, ids = run_blindly(stage, swap(lambda s: [(s.key(HIT, 0), s.key(HIT, 1))]))
        assert pages == [HIT]
        assert ids != stage.truth(stage.request)


def test_a_header_that_is_damaged_alone_changes_no_page(blind: None, servers: KVServers) -> None:
    with Stage(SMALL, servers) as stage:
        pages, ids = run_blindly(stage, change(flip(0)))
        assert (pages, ids) == ([], stage.truth(stage.request))


# --- holds ----------------------------------------------------------------------------------------


def test_pages_given_back_before_their_fetch_has_settled_are_overwritten(
    servers: KVServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = FetchState._advance

    def hasty(state: FetchState) -> Outcome:
        return advance(replace(state, flying=0) if state.aborted else state)

    monkeypatch.setattr(FetchState, "_advance", hasty)
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


def raced(servers: KVServers, race: Callable[[Stage, int, int], Tally]) -> Tally:
    with Stage(TIGHT, servers) as stage:
        return race(stage, ROUNDS, TURNS)


# --- the matrix itself ----------------------------------------------------------------------------


def nothing(stage: Stage) -> None:
    """No fault."""


@pytest.mark.parametrize(
    "play",
    [
        pytest.param(stored(nothing, lost(1, "corrupt")), id="lost"),
        pytest.param(stored(nothing, nothing_fetched), id="nothing fetched"),
        pytest.param(stored(nothing, one_not_found), id="one not found"),
        pytest.param(fetching(nothing, some_lost), id="some lost"),
        pytest.param(publishing(nothing, some_refused), id="some refused"),
        pytest.param(publishing(nothing, some_unmarked, server="index"), id="some unmarked"),
    ],
)
def test_a_row_whose_fault_did_not_happen_fails(play: Act, servers: KVServers) -> None:
    with Stage(SMALL, servers, limit_s=1.0) as stage, pytest.raises(AssertionError):
        play(stage)


def test_a_row_whose_tokens_are_wrong_fails(servers: KVServers) -> None:
    def other_truth(stage: Stage) -> None:
        right = stage.truth

        def wrong(request: Request) -> list[int]:
            return right(request)[::-1]

        stage.truth = wrong  # type: ignore[method-assign]

    play = stored(other_truth, all_of())
    with Stage(SMALL, servers) as stage, pytest.raises(AssertionError, match="other tokens"):
        play(stage)


def test_a_row_that_hangs_fails(servers: KVServers) -> None:
    def play(stage: Stage) -> None:
        stage.publish()
        stage.node("d0")
        stage.strike(lambda s: s.link("d0", "data0").hold())
        stage.struck_at -= 60.0
        stage.run("d0")

    with Stage(SMALL, servers) as stage, pytest.raises(AssertionError, match="waited"):
        play(stage)
