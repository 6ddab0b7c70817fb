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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who reads findings needs no torch
    import torch

# The key of the lines of `first_try`.
BEGUN = "begun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a part's results.

    A measurement has a `value` and a `unit`; `share` is the value's share of a bound (1.0 is the
    bound), which `of` names, such as "copy bandwidth" or "transformers". A check has `passed`.
    A fact, such as the card's name, has only a `note`.
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
        self._append(Finding(name=name, value=value, unit=unit, share=share, of=of, note=note))

    def checked(self, name: str, passed: bool, note: str = "") -> None:
        """Write whether something holds; `note` says what differs if it does not."""
        self._append(Finding(name=name, passed=passed, note=note))

    def noted(self, name: str, note: str) -> None:
        """Write a fact, such as a version."""
        self._append(Finding(name=name, note=note))

    def first_try(self, name: str) -> bool:
        """Whether no earlier process of this part has begun `name`; from now on one has. A part
        whose process dies is started again if it had begun something new, so a part that asks
        before each of its rows loses only the row that its process died of."""
        if name in begun(self.path):
            return False
        self._write({BEGUN: name})
        return True

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Write an exception of the block as a failed check, and go on. An error of the device that
        stays (a "sticky" one) makes all later work of the process fail in the same way."""
        try:
            yield
        except Exception as error:
            self.checked(name, False, f"{type(error).__name__}: {error}".splitlines()[0][:300])

    def _append(self, finding: Finding) -> None:
        self._write(asdict(finding))

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[Finding]:
    """The findings in a file."""
    return [Finding(**line) for line in _lines(path) if BEGUN not in line]


def begun(path: Path) -> list[str]:
    """The names that the processes of a part have begun, in this order."""
    return [line[BEGUN] for line in _lines(path) if BEGUN in line]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines, without one that a killed process left unfinished."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found
