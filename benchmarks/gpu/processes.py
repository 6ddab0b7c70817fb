"""Runs one part of `make gpu` in a process of its own, and ends all that it started.

In: the part, its limit, and what its findings may know. Out: an `Outcome`: the findings, also those
of a part that hung or died, and how it ended.

All processes below a part carry a mark in their environment, by which they are found even if they
began a session of their own or lost their parent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.gpu.findings import Finding, begun, read
from benchmarks.gpu.parts import Part

ROOT = Path(__file__).resolve().parents[2]
MARK = "BATON_GPU_PART"
ENDED, INTERRUPTED = "ended", "interrupted"
LOOK_S = 0.05
# Time for the imports of a part, beside its limit.
IMPORT_S = 120.0
# The least that is worth starting a process for, imports included.
LEAST_S = 5.0
# Rounds of ending what a part has left: a process may start another while it is looked for.
ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`state` is ENDED or says what stopped the part. `seconds` includes its imports."""

    name: str
    state: str
    seconds: float
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        return self.state == ENDED and not any(each.passed is False for each in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a part gets. `end` is a time.monotonic() at which it must have ended, whatever its
    limit; `folder` is for its files; `ceilings` are the measurements of the part `card`."""

    folder: Path
    limit: float
    end: float
    dry: bool
    ceilings: Mapping[str, float] = field(default_factory=dict)

    def file(self, part: Part, ending: str) -> Path:
        return self.folder / f"{part.name}.{ending}"


def run_part(part: Part, given: Conditions) -> Outcome:
    """Run the part. If its process dies within a row (see Findings.first_try), the row is a failed
    check, and another process goes on behind it."""
    began, path = time.monotonic(), given.file(part, "jsonl")
    died: list[Finding] = []
    left = given.limit
    while True:
        before = len(begun(path))
        state = _run_once(part, replace(given, limit=left))
        rows = begun(path)
        if state in (ENDED, INTERRUPTED) or len(rows) == before:
            break
        if not any(each.name == rows[-1] and each.passed is False for each in read(path)):
            died.append(Finding(name=rows[-1], passed=False, note=f"its process died: {state}"))
        left = given.limit - (time.monotonic() - began)
        if left < LEAST_S or time.monotonic() + LEAST_S > given.end:
            break
    return Outcome(
        name=part.name,
        state=state,
        seconds=time.monotonic() - began,
        findings=[*read(path), *died],
    )


def _run_once(part: Part, given: Conditions) -> str:
    mark = uuid.uuid4().hex
    ready, log = given.file(part, "ready"), given.file(part, "log")
    ready.unlink(missing_ok=True)
    began, process = time.monotonic(), None
    try:
        with log.open("ab") as output:
            began_at = output.tell()
            process = subprocess.Popen(
                _command(part, given, ready),
                cwd=ROOT,
                env=_environment(mark, dry=given.dry),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        began = time.monotonic()
        in_time = _wait(process, ready, given)
    except KeyboardInterrupt:  # perhaps before Popen has returned
        return INTERRUPTED
    finally:
        _end_all(process, mark)
    if not in_time:
        return f"killed after {time.monotonic() - began:.0f} s"
    code = process.returncode
    if code < 0:
        return f"signal {-code}"
    return ENDED if code == 0 else f"exit {code}: {_last_line(log, began_at)}"


def _command(part: Part, given: Conditions, ready: Path) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.gpu.child", part.module]
    words += [str(given.file(part, "jsonl")), "--ready", str(ready)]
    words += ["--limit", str(given.limit), "--end", str(given.end)]
    words += ["--ceilings", json.dumps(given.ceilings)]
    return [*words, "--dry"] if given.dry else words


def _environment(mark: str, *, dry: bool) -> dict[str, str]:
    """A dry run uses triton's interpreter and no card, even if there is one."""
    environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if dry:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment


def _wait(process: subprocess.Popen[bytes], ready: Path, given: Conditions) -> bool:
    """Whether the process ended by itself. Its limit begins when its imports are done."""
    deadline, imported = time.monotonic() + IMPORT_S + given.limit, False
    while process.poll() is None:
        if not imported and ready.exists():
            deadline, imported = time.monotonic() + given.limit, True
        if time.monotonic() >= min(deadline, given.end):
            return False
        time.sleep(LOOK_S)
    return True


def _end_all(process: subprocess.Popen[bytes] | None, mark: str) -> None:
    """Kill the part's process group, and whatever else carries its mark."""
    if process is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for _ in range(ROUNDS):
        left = list(_marked(mark))
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _marked(mark: str) -> Iterator[int]:
    """The processes with this mark. The environment of one that has ended is empty."""
    word = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if word in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def _last_line(log: Path, began_at: int) -> str:
    with log.open("rb") as output:
        output.seek(began_at)
        lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"
