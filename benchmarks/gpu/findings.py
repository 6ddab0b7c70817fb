"""What a part of `make gpu` finds, written down at once.

In: measurements and checks, one call each. Out: a file with one JSON object per line, appended and
flushed by each call, so that a part that crashes, hangs or loses its device keeps what it found.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a part's results.

    A measurement has a `value` and a `unit`; `share` is the value's share of a bound (1.0 is the
    bound), which `of` names, such as "copy bandwidth" or "transformers". A check has `passed`.
    """

    name: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    of: str = ""
    passed: bool | None = None
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Findings:
    """Where a part writes, and what it may know of its run.

    `ceilings` are the measurements of the part `card` by name, such as "copy bandwidth" in GB/s;
    empty if that part did not end. `dry` means a machine without a card: the CPU is the device,
    kernels run in triton's interpreter, and shapes are tiny. `deadline` is a time.monotonic().
    """

    path: Path
    device: torch.device
    dry: bool
    deadline: float
    ceilings: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def measured(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        share: float | None = None,
        of: str = "",
        note: str = "",
    ) -> None:
        """Write a measurement."""
        self._append(
            Finding(name=name, value=value, unit=unit, share=share, of=of, note=note)
        )

    def checked(self, name: str, passed: bool, note: str = "") -> None:
        """Write whether something holds; `note` says what differs if it does not."""
        self._append(Finding(name=name, passed=passed, note=note))

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Write an exception of the block as a failed check, and go on. An error of the device that
        stays (a "sticky" one) makes all later work of the process fail in the same way."""
        try:
            yield
        except Exception as error:
            self.checked(name, False, f"{type(error).__name__}: {error}".splitlines()[0][:300])

    def _append(self, finding: Finding) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(finding)) + "\n")


def read(path: Path) -> list[Finding]:
    """The findings in a file. A line that a killed process left unfinished is dropped."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(Finding(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return found
