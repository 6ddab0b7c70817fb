"""EngineCore over a scripted runner, with the block size of an oracle."""

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
    """An engine with large limits. `facts` override fields of EngineInfo."""
    defaults: dict[str, Any] = {
        "layout": kv_layout(block=block_size),
        "num_blocks": 512,
        "max_model_len": 8192,
        "max_batched_tokens": 8192,
        "max_num_seqs": 64,
    }
    return scripted(script, **(defaults | facts))


def step(engine: EngineCore, run: Run | None = None) -> list[TokenOut]:
    """Run one step and check the pool's integrity. Return the new tokens."""
    return step_once(engine, run or Run()).tokens


def row_sizes(runner: ScriptedRunner, index: int = -1) -> list[int]:
    """The number of tokens of each row of a step."""
    return [len(row.tokens) for row in runner.steps[index]]


def tables(runner: ScriptedRunner, index: int = -1) -> list[Sequence[BlockId]]:
    """The block table of each row of a step."""
    return [row.blocks for row in runner.steps[index]]


def hashes_of(engine: EngineCore, tokens: Sequence[int]) -> list[BlockHash]:
    """The block hashes of the full blocks of `tokens` in this engine."""
    root = root_hash(engine.info.fingerprint)
    return extend_hashes(root, tokens, engine.info.layout.block_size)


def free_order(engine: EngineCore) -> list[int]:
    """The engine's free queue, head first."""
    return list(engine._pool.free_order())


def usage(engine: EngineCore) -> float:
    """The share of the usable blocks that have a holder."""
    load = engine.load()
    return 1 - load.free_blocks / load.total_blocks
