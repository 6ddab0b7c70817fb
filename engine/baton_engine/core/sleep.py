"""What an engine computes with, and gives back while it sleeps.

In: the parts to free or to restore, as vLLM's tags name them. Out: a runner, a drafter and the
engine's properties, which a wake-up makes again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton_engine.errors import EngineAsleep, SettingsError
from baton_engine.interface import (
    LEVELS,
    PARTS,
    EngineInfo,
    KVMemory,
    Launched,
    Part,
    Runner,
    SleepLevel,
)
from baton_engine.kv.host_blocks import HostMemory
from baton_engine.scheduling.draft_source import DraftSource


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine computes with while it is awake. `host` is the host tier's memory."""

    info: EngineInfo
    runner: Runner
    host: HostMemory | None = None
    drafter: DraftSource | None = None


class Resources(Protocol):
    """The memory of an engine. Its owner calls these only while nothing runs, and drops the
    EngineParts before it frees one.

    Each method may be called again, without further effect. The pool stays the same object, and its
    views stay valid; its bytes are zeros after restore_kv().
    """

    def free_kv(self) -> None: ...

    def restore_kv(self) -> None:
        """Raises SettingsError if there is no memory."""
        ...

    def free_weights(self, level: SleepLevel) -> None: ...

    def restore_weights(self) -> None:
        """Raises ModelError or SettingsError if they cannot be loaded: then they are still
        away."""
        ...

    def replace_weights(self, weights: Path | Mapping[str, Any]) -> None:
        """Load the weights of another folder in place of these, which may be away, or these with
        some tensors replaced. Raises ModelError or SettingsError, with the old weights as before,
        if they are not another version of the same model."""
        ...

    def start(self) -> EngineParts:
        """New parts. All memory is there."""
        ...


class NoRunner:
    """The runner of an engine that sleeps."""

    def __init__(self, memory: KVMemory) -> None:
        self.memory = memory

    def launch(self, rows: object) -> Launched:
        raise EngineAsleep("the engine sleeps; wake it up first")


def check_sleep(level: object, mode: object, modes: Collection[str]) -> None:
    """Raises SettingsError for an unknown level or mode."""
    if level not in LEVELS:
        raise SettingsError(f"sleep level {level} is unknown; use 1 or 2")
    if mode not in modes:
        raise SettingsError(f"sleep mode {mode!r} is unknown; use {' or '.join(modes)}")


def checked_parts(tags: Collection[str] | None) -> frozenset[Part]:
    """The parts that the tags name; all without tags. Raises SettingsError for an unknown one."""
    unknown = sorted(set(tags or ()) - set(PARTS))
    if unknown:
        raise SettingsError(f"tag {unknown[0]!r} is unknown; use {' or '.join(PARTS)}")
    return frozenset(part for part in PARTS if tags is None or part in tags)
