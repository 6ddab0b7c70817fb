"""Landed KV with holes, on real weights: some blocks of a prompt arrive shard by shard, and the
engine computes the rest. Its ids and KV equal those of an undisturbed run, although every other
block of the pool is NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton_engine.core.engine_core import EngineCore
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.ids import BlockId
from tests.support.engines.engine_core import drive
from tests.support.engines.small_pool import kv_of
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import make_request, small_engine

LANDED_RANGES = [  # ranges of blocks [start, end) that arrive
    [(1, 3), (5, 6)],
    [(0, 1), (2, 3), (4, 5)],
    [(2, 6)],
    [(0, 2), (4, 6)],
]


def pool_of(engine: EngineCore) -> torch.Tensor:
    assert isinstance(engine.memory, TorchMemory)
    return kv_of(engine.memory)


@pytest.mark.pairwise
@pytest.mark.parametrize("landed", LANDED_RANGES)
@pytest.mark.parametrize("budget", [10, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "shards"), [("llama-gqa2-tied", 1), ("llama-gqa2-tied", 2), ("qwen3-gqa4", 2)]
)
def test_the_engine_computes_the_holes_between_landed_blocks(
    model: str,
    shards: int,
    dtype: str,
    budget: int,
    landed: list[tuple[int, int]],
    tiny_model: Callable[[str], Path],
) -> None:
    source, target = (
        small_engine(
            tiny_model(model), dtype=dtype, kv_shards=shards, max_batched_tokens=size, kv_blocks=40
        )
        for size in (256, budget)
    )
    request = make_request("a", prompt_of(16 * 6 + 5, seed=2))
    source.submit(request)
    undisturbed = drive(source)
    pool_of(target)[1:] = torch.nan
    target.hold([BlockId(1)])  # the target's blocks then have other ids than the source's
    reservation = target.reserve(request)
    assert reservation is not None
    size = source.info.layout.block_bytes // shards
    for start, end in landed:
        for shard in range(shards):
            data = memoryview(bytearray(size * (end - start)))
            source.memory.read([BlockId(1 + each) for each in range(start, end)], data, shard)
            target.memory.write(reservation.blocks[start:end], data, shard)
    target.submit(request, reservation=reservation, landed=landed)
    run = drive(target)
    assert run.use("a")[1] == 16 * sum(end - start for start, end in landed)
    if dtype == "float32":  # in bfloat16 another batch shape may change the ids
        assert run.ids("a") == undisturbed.ids("a")
    tolerance = {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    actual, expected = (
        pool_of(engine)[list(blocks)].float()
        for engine, blocks in ((target, reservation.blocks[:6]), (source, range(1, 7)))
    )
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
