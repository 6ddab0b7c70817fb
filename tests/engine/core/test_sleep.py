"""An engine that sleeps: what it forgets, what it refuses, and that it computes the same
afterwards. With the simulated engine, whose tokens depend on every byte of KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import EngineAsleep, EngineBusy, SettingsError
from baton_engine.interface import SleepLevel
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.ids import BlockId, RequestId
from tests.support.engines.engine_core import Run as Results
from tests.support.engines.engine_core import drive, make_request, run_all, scripted, step_once

REQUESTS = [make_request(name, 40, max_tokens=9) for name in ("a", "b")]
TIER = 20 * 8192  # bytes: 20 blocks


def engine_of(**settings: Any) -> EngineCore:
    return build_sim(SimSettings(num_blocks=24, chunk_blocks=1, **settings))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": True},
        {"host_kv_memory": TIER},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    ],
)
def test_an_engine_forgets_its_cache_and_computes_the_same_afterwards(
    settings: dict[str, Any], level: SleepLevel
) -> None:
    engine = engine_of(**settings)
    before = run_all(engine, REQUESTS).all_ids()
    stored = set(engine.cached_chunks())
    engine.cache_changes()
    engine.sleep(level)
    engine.check_integrity()
    assert engine.away == ("weights", "kv_cache")
    assert set(engine.cache_changes().evicted) == stored
    assert not engine.cached_chunks()
    load = engine.load()
    assert (load.free_blocks, load.cached_blocks, load.host_blocks) == (24, 0, 0)
    engine.wake_up()
    after = run_all(engine, REQUESTS)
    assert after.all_ids() == before
    assert after.use("a")[0] == 0


def test_an_engine_that_is_half_awake_computes_nothing() -> None:
    engine = engine_of()
    engine.sleep()
    engine.wake_up(["kv_cache"])
    assert engine.away == ("weights",)
    for act in (engine.submit, engine.reserve):
        with pytest.raises(EngineAsleep, match="without weights"):
            act(REQUESTS[0])
    assert not engine.has_work()
    engine.wake_up(["weights"])
    engine.wake_up()  # no effect
    assert not engine.is_sleeping
    run_all(engine, REQUESTS)


def test_a_sleep_may_become_deeper() -> None:
    engine = engine_of()
    engine.sleep(1)
    engine.wake_up(["weights"])
    engine.sleep(2)
    assert engine.away == ("weights", "kv_cache")
    engine.wake_up()
    run_all(engine, REQUESTS)


def hold_a_block(engine: EngineCore) -> Callable[[], None]:
    engine.hold([BlockId(3)])
    return lambda: engine.unhold([BlockId(3)])


def reserve_blocks(engine: EngineCore) -> Callable[[], None]:
    reservation = engine.reserve(REQUESTS[0])
    assert reservation is not None
    return lambda: engine.release(reservation)


def run_a_request(engine: EngineCore) -> Callable[[], None]:
    engine.submit(REQUESTS[0])
    step_once(engine, Results())
    return lambda: engine.abort(RequestId("a"))


@pytest.mark.parametrize("begin", [hold_a_block, reserve_blocks, run_a_request])
def test_an_engine_with_something_in_flight_refuses_to_sleep_and_goes_on(
    begin: Callable[[EngineCore], Callable[[], None]],
) -> None:
    engine = engine_of(overlap=True)
    end = begin(engine)
    with pytest.raises(EngineBusy, match="in transfer"):
        engine.sleep()
    assert not engine.is_sleeping
    end()
    engine.sleep()  # with the step in flight whose only request was aborted
    engine.check_integrity()


def test_with_the_mode_abort_running_requests_are_forgotten() -> None:
    engine = engine_of(overlap=True)
    undisturbed = run_all(engine_of(), REQUESTS).all_ids()
    run_a_request(engine)
    engine.sleep(mode="abort")
    engine.check_integrity()
    engine.wake_up()
    assert run_all(engine, REQUESTS).all_ids() == undisturbed


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda engine: engine.sleep(3), "level 3"),
        (lambda engine: engine.sleep(mode="wait"), "mode 'wait'"),
        (lambda engine: engine.wake_up(["kv"]), "tag 'kv'"),
        (lambda engine: engine.update_weights(), "a path or tensors"),
        (lambda engine: engine.update_weights("/m", {}), "a path or tensors"),
        (lambda engine: engine.update_weights("/m"), "no weights"),
        (lambda engine: scripted()[0].sleep(), "nothing owns its memory"),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(
    act: Callable[[EngineCore], None], message: str
) -> None:
    engine = engine_of()
    with pytest.raises(SettingsError, match=message):
        act(engine)
    assert not engine.is_sleeping
    drive(engine)
    assert run_all(engine, REQUESTS).finished == ["a", "b"]
