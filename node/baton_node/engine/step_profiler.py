"""A profile of the next steps, in the engine process.

In: StartProfile and StopProfile; a call after each step. Out: a trace of torch.profiler in the file
that StartProfile names, and then Profiled. A thread writes the file, so that steps go on meanwhile.
One profile at a time. A profiled step is slower, and its events take memory: hence MOST_STEPS.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from baton_engine.interface import EngineInfo
from baton_node.ipc.messages import Profiled, StartProfile

SIMULATED = "the simulated engine computes nothing that torch.profiler could show"
BUSY = "a profile is being made already"


class Recording(Protocol):
    """A running profiler. `stop` ends it and returns what writes its trace to a file."""

    def stop(self) -> Callable[[str], None]: ...


class StepProfiler:
    """Owned by the step loop, whose thread calls all methods. `record` starts a profiler."""

    def __init__(
        self,
        info: EngineInfo,
        send: Callable[[Profiled], None],
        record: Callable[[], Recording] | None = None,
    ) -> None:
        self._simulated = info.kind == "sim" and record is None
        self._send = send
        self._record = record_torch if record is None else record
        self._frame: StartProfile | None = None
        self._recording: Recording | None = None
        self._steps = 0
        self._written: queue.SimpleQueue[Profiled] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a profile is recorded or written."""
        return self._frame is not None

    def start(self, frame: StartProfile) -> None:
        if self._simulated:
            self._send(Profiled(frame.path, 0, SIMULATED))
        elif self.busy:
            self._send(Profiled(frame.path, 0, BUSY))
        else:
            try:
                self._recording = self._record()
            except RuntimeError as error:  # of torch
                self._send(Profiled(frame.path, 0, f"torch.profiler does not start: {error}"))
                return
            self._frame, self._steps = frame, 0

    def stop(self) -> None:
        """End the profile early. Without one, do nothing."""
        recording, frame = self._recording, self._frame
        if recording is None or frame is None:
            return
        self._recording = None
        write = recording.stop()
        steps = self._steps

        def act() -> None:
            try:
                write(frame.path)
            except Exception as error:  # the thread's outer edge: the server gets the reason
                self._written.put(Profiled(frame.path, steps, f"cannot write the trace: {error}"))
            else:
                self._written.put(Profiled(frame.path, steps))

        self._writer = threading.Thread(target=act, name="profile-writer", daemon=True)
        self._writer.start()

    def turn(self, stepped: bool) -> None:
        """One iteration of the loop has ended; `stepped`: it ran a step."""
        if self._frame is None:
            return
        if self._recording is not None and stepped:
            self._steps += 1
            if self._steps >= self._frame.steps:
                self.stop()
        if not self._written.empty():
            self._send(self._written.get())
            self._frame = self._writer = None


class _TorchRecording:
    def __init__(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> Callable[[str], None]:
        self._profile.stop()
        return self._profile.export_chrome_trace


def record_torch() -> Recording:
    return _TorchRecording()
