"""Host: what the checks read of this machine, so that a test can give them another one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton_engine.memory.host_memory import ROOT


@dataclass(frozen=True, kw_only=True)
class Host:
    """`root` is the folder of /proc and /sys; `clock` gives the time of day in Unix seconds. Every
    deadline is multiplied by `patience`: on a busy machine, a test must not depend on them."""

    root: Path = ROOT
    clock: Callable[[], float] = time.time
    patience: float = 1.0
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def text(self, path: str) -> str:
        """The text of a file below the root, "" if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
