"""The models that are timed, and the fewest bytes that a step of them moves.

In: a name of `benchmarks/shapes`. Out: the settings of an engine with random weights, and lower
bounds of times from the card's own bandwidth and products. A dry run has a tiny model in place of
each.

A bound of a decode step: the weights once, and the KV of all tokens that its rows see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from baton_cli.bench.workload import Workload, WorkloadItem, nano_vllm
from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.core.engine_core import EngineCore
from baton_engine.memory.estimate import count_weights
from baton_engine.memory.requirements import layout_of
from baton_protocol.layout import KVLayout
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.in_order import free_memory
from benchmarks.gpu.names import COPY, GEMM

SHAPES = Path(__file__).parents[1] / "shapes"
DRY = "dry"
ITEM_BYTES = 2
GB = 1e9
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """A model with random weights on the device of the findings."""

    findings: Findings
    name: str

    @property
    def folder(self) -> Path:
        return SHAPES / (DRY if self.findings.dry else self.name)

    @cached_property
    def config(self) -> ModelConfig:
        return read_config(self.folder)

    @cached_property
    def layout(self) -> KVLayout:
        return layout_of(self.settings(), self.config)

    @property
    def vocab(self) -> int:
        return self.config.vocab_size

    def settings(self, **changes: Any) -> TorchSettings:
        """Settings of an engine of this shape. A dry run's pools hold 500 blocks, whatever memory
        they have on a card."""
        usual: dict[str, Any] = {
            "model": self.folder,
            "load_format": "dummy",
            "device": str(self.findings.device),
        }
        if self.findings.dry:
            usual |= {"dtype": "float32", "threads": 1, "kv_blocks": 500}
            changes.pop("kv_memory", None)
        return TorchSettings(**{**usual, **changes})

    @contextmanager
    def engine(self, **changes: Any) -> Iterator[EngineCore]:
        """An engine for one block; nothing may refer to it later."""
        free_memory()
        yield build_torch(self.settings(**changes))

    @property
    def step_weights(self) -> int:
        """The weights that a step reads: of an embedding that is not the head, only a few rows."""
        embedding = self.config.vocab_size * self.config.hidden_size
        return count_weights(self.config) - (0 if self.config.tied else embedding)

    def decode_floor_ms(self, rows: int, keys: float) -> float | None:
        """The least milliseconds of a decode step; None if the bandwidth is unknown."""
        return self._copy_ms(self.step_weights * ITEM_BYTES + rows * keys * self.token_bytes)

    @property
    def token_bytes(self) -> int:
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * ITEM_BYTES

    def prefill_floor_ms(self, length: int) -> float | None:
        """The least milliseconds to compute a prompt: its products and its causal attention. None
        if the speed of products is unknown."""
        config = self.config
        layers = self.step_weights - config.vocab_size * config.hidden_size
        attention = 2 * config.num_layers * config.num_heads * config.head_dim * length * length
        speed = self.findings.ceilings.get(GEMM)
        return (2 * layers * length + attention) / speed / 1e9 if speed else None

    def workload_floor_ms(self, work: Workload) -> float | None:
        """The least milliseconds of a workload: its prompts, and as many decode steps as its
        longest answer has tokens."""
        seen = sum(
            len(item.prompt) * item.new_tokens + item.new_tokens * (item.new_tokens + 1) // 2
            for item in work.items
        )
        weights = work.longest_answer * self.step_weights * ITEM_BYTES
        decode = self._copy_ms(weights + seen * self.token_bytes)
        prompts = [self.prefill_floor_ms(len(item.prompt)) for item in work.items]
        if decode is None or None in prompts:
            return None
        return decode + sum(each for each in prompts if each is not None)

    def _copy_ms(self, size: float) -> float | None:
        speed = self.findings.ceilings.get(COPY)
        return size / speed / 1e6 if speed else None


def share(floor: float | None, found: float) -> float | None:
    return None if floor is None else floor / found


def reference_workload(shape: Shape) -> Workload:
    """nano-vllm's; in a dry run four short prompts."""
    if not shape.findings.dry:
        return nano_vllm(shape.vocab)
    items = tuple(WorkloadItem(tuple(range(9 + number)), 4 + number) for number in range(4))
    return Workload("dry", items, 0.6)
