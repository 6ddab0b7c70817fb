"""The torch engine's greedy ids equal those of transformers also when KV goes through host memory.

A pool of 44 blocks holds one prompt of 600 tokens with its output and little else. The first round
over the prompts evicts every block, and the second round loads the blocks from the host tier.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engines.exactness import Tally, compare_all
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

PROMPTS = [prompt_of(length, seed=seed) for length in (17, 600, 33) for seed in (1, 2)]
ENOUGH = 1 << 26  # bytes, more than all blocks of the prompts need
Report = Callable[[str, object], None]


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        pytest.param("llama-gqa4", "off", marks=pytest.mark.long),
        ("llama-gqa4", "of 30 blocks"),
        ("llama-gqa4", "of all blocks"),
        pytest.param("qwen3-gqa2", "of all blocks", marks=pytest.mark.long),
        ("mistral-window", "of all blocks"),
    ],
)
def test_ids_equal_those_of_transformers_when_all_kv_goes_through_the_host_tier(
    name: str, tier: str, tiny_model: Callable[[str], Path], record_property: Report
) -> None:
    folder, tally = tiny_model(name), Tally()
    block = small_engine(folder, kv_blocks=1).info.layout.block_bytes
    room = {"off": 0, "of 30 blocks": 30 * block, "of all blocks": ENOUGH}[tier]
    engine = small_engine(folder, kv_blocks=44, host_kv_memory=room)
    compare_all(folder, PROMPTS, generate_ids(engine, PROMPTS), tally, f"tier {tier}, first")
    compare_all(folder, PROMPTS, generate_ids(engine, PROMPTS), tally, f"tier {tier}, again")
    load = engine.load()
    assert (load.host_loaded_blocks_total > 0) == bool(room)
    if tier == "of all blocks":
        assert load.host_evicted_blocks_total == 0
        # Of a model with a window in all layers, only the last window is loaded.
        window = engine.info.layout.window
        assert load.host_prompt_tokens_total > (1000 if window is None else window)
    record_property("exactness", f"{name}, tier {tier}: {tally}")
    tally.check()
