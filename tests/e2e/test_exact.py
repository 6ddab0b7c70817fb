"""--batch-invariant of `baton up` reaches each engine, and what the engines say reaches clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.clients.http import complete
from tests.support.engines.tiny_models import prompt_of
from tests.support.pools.baton_up import Pool


def test_answers_and_nodes_of_a_batch_invariant_pool_are_bitwise_exact(
    tiny_model: Callable[[str], Path],
) -> None:
    flags = [
        *("--model", str(tiny_model("llama-gqa4")), "--dtype", "float32", "--threads", "1"),
        *("--prefill", "1", "--decode", "1", "--kv-blocks", "100", "--handoff", "always"),
        *("--batch-invariant", "on"),
    ]
    with Pool(flags) as pool:
        answer = complete(pool.url, prompt_of(40, seed=1), max_tokens=4)
        assert "prefill-0" in answer.headers["x-baton-placement"]
        assert answer.headers["x-baton-exact"] == "bitwise"
        assert [node["exact"] for node in pool.pool()["nodes"]] == ["bitwise"] * 2
