"""A profile of steps in the engine process: it ends by itself, and only one is made at a time."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton_engine.interface import EngineInfo
from baton_engine.sim.build import SimSettings, build_sim
from baton_node.engine.step_profiler import StepProfiler, record_torch
from baton_node.ipc.messages import Profiled, StartProfile, StopProfile
from tests.support.nodes.step_loops import LoopNode

SIM = build_sim(SimSettings()).info


class FakeRecording:
    """Writes the number of stops, or fails."""

    def __init__(self, error: str = "") -> None:
        self.stops = 0
        self.error = error

    def stop(self) -> Callable[[str], None]:
        self.stops += 1
        return self._write

    def _write(self, path: str) -> None:
        if self.error:
            raise OSError(self.error)
        Path(path).write_text(f"{self.stops}")


def torch_info() -> EngineInfo:
    return replace(SIM, kind="torch")


def turn_until_sent(profiler: StepProfiler, sent: list[Profiled], stepped: bool = False) -> None:
    ends = time.monotonic() + 60
    while not sent and time.monotonic() < ends:
        profiler.turn(stepped)
        time.sleep(0.001)


def test_a_profile_ends_after_its_steps_and_counts_only_those_that_ran(tmp_path: Path) -> None:
    sent: list[Profiled] = []
    path, recording = str(tmp_path / "t"), FakeRecording()
    profiler = StepProfiler(torch_info(), sent.append, lambda: recording)
    profiler.start(StartProfile(3, path))
    for stepped in (True, False, True, False):
        profiler.turn(stepped)
    assert (recording.stops, profiler.busy) == (0, True)
    profiler.turn(stepped=True)
    turn_until_sent(profiler, sent, stepped=True)
    assert (sent, recording.stops) == ([Profiled(path, 3)], 1)
    assert Path(path).read_text() == "1"
    assert not profiler.busy


def test_a_profile_can_end_early_and_a_second_one_is_refused(tmp_path: Path) -> None:
    sent: list[Profiled] = []
    path = str(tmp_path / "t")
    profiler = StepProfiler(torch_info(), sent.append, FakeRecording)
    profiler.stop()
    profiler.start(StartProfile(9, path))
    profiler.start(StartProfile(9, "other"))
    assert sent == [Profiled("other", 0, "a profile is being made already")]
    sent.clear()
    profiler.turn(stepped=True)
    profiler.stop()
    turn_until_sent(profiler, sent)
    assert sent == [Profiled(path, 1)]


def test_a_trace_that_cannot_be_written_is_reported() -> None:
    sent: list[Profiled] = []
    profiler = StepProfiler(torch_info(), sent.append, lambda: FakeRecording("disk full"))
    profiler.start(StartProfile(1, "p"))
    turn_until_sent(profiler, sent, stepped=True)
    assert sent == [Profiled("p", 1, "cannot write the trace: disk full")]


def test_a_profiler_that_does_not_start_is_reported() -> None:
    def fail() -> FakeRecording:
        raise RuntimeError("no kineto")

    sent: list[Profiled] = []
    profiler = StepProfiler(torch_info(), sent.append, fail)
    profiler.start(StartProfile(1, "p"))
    assert sent == [Profiled("p", 0, "torch.profiler does not start: no kineto")]
    assert not profiler.busy


def test_a_loop_with_a_simulated_engine_refuses_a_profile() -> None:
    node = LoopNode("n")
    node.take(StartProfile(3, "p"), StopProfile())
    node.loop.turn()
    [frame] = [frame for frame in node.port.sent if isinstance(frame, Profiled)]
    assert (frame.path, frame.steps) == ("p", 0)
    assert frame.error.startswith("the simulated engine computes nothing")
    node.close()


@pytest.mark.long
def test_the_trace_of_torch_names_its_operations(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    recording = record_torch()
    torch.ones(8, 8) @ torch.ones(8, 8)
    recording.stop()(str(path))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}
