"""The product's core over a scripted runner, with blocks of the size that an oracle speaks of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Sample, TokenOut
from baton_protocol.hashing import extend_hashes, root_hash
from baton_protocol.ids import BlockHash, BlockId
from tests.support.engines.demands import kv_layout
from tests.support.engines.engine_core import Run, ScriptedRunner, scripted, step_once


def engine_of(
    block_size: int = 16, script: Callable[[Sample], int] | None = None, **facts: Any
) -> tuple[EngineCore, ScriptedRunner]:
    """Roomy where `facts` (of EngineInfo) do not say otherwise."""
    roomy: dict[str, Any] = {
        "layout": kv_layout(block=block_size),
        "num_blocks": 512,
        "max_model_len": 8192,
        "max_batched_tokens": 8192,
        "max_num_seqs": 64,
    }
    return scripted(script, **(roomy | facts))


def step(engine: EngineCore, run: Run | None = None) -> tuple[TokenOut, ...]:
    """One step with its books checked; the tokens it brought."""
    return step_once(engine, run or Run()).tokens


def shares(runner: ScriptedRunner, index: int = -1) -> list[int]:
    """Tokens of each row of a step."""
    return [len(row.tokens) for row in runner.steps[index]]


def tables(runner: ScriptedRunner, index: int = -1) -> list[Sequence[BlockId]]:
    """Block table of each row of a step."""
    return [row.blocks for row in runner.steps[index]]


def hashes_of(engine: EngineCore, tokens: Sequence[int]) -> list[BlockHash]:
    """Names of the full blocks of `tokens`, as this engine gives them."""
    root = root_hash(engine.info.fingerprint)
    return extend_hashes(root, tokens, engine.info.layout.block_size)


def free_order(engine: EngineCore) -> list[int]:
    """The engine's free queue, head first."""
    return list(engine._pool.free_order())


def usage(engine: EngineCore) -> float:
    """Share of the usable blocks that somebody holds."""
    load = engine.load()
    return 1 - load.free_blocks / load.total_blocks
