"""A pool whose nodes round the same checkpoint to different weights: no request uses two formats.

The nodes share a store. Each answer has the bits of an engine alone with the format of the node
that gave it, also when the store has its prompt from nodes of every format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.bits.cells import GREEDY, Answer, Bench, Subject, run
from tests.bits.test_pools import answer_of, flags, send
from tests.support.engines.tiny_models import prompt_of
from tests.support.pools.leaks import settle
from tests.support.pools.processes import Cluster

FORMATS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "fp8": ("--quantization", "fp8"),
    "int4": ("--quantization", "int4"),
}
SUBJECTS = [
    Subject(f"prompt {number}", tuple(prompt_of(150, seed=40 + number)), GREEDY.params)
    for number in range(12)
]


@pytest.mark.long
def test_nodes_of_three_formats_share_requests_and_never_kv(
    tiny_model: Callable[[str], Path],
) -> None:
    bench = Bench(tiny_model("llama-gqa4"), "bfloat16")
    expected = {name: answers(bench, name) for name in FORMATS}
    assert len({answer["prompt 0"] for answer in expected.values()}) == len(FORMATS)
    formats = {"decode-0": "none"}
    with Cluster(0, 1, flags=flags(bench), router_flags=["--handoff=always"]) as pool:

        def join(name: str, format_: str) -> None:
            formats[name] = format_
            pool.join(name, name.split("-")[0], *FORMATS[format_])
            pool.wait(lambda: state_of(pool, name).get("state") == "ready", f"use {name}")

        join("decode-1", "fp8")
        join("prefill-0", "int4")
        why = "they differ in fingerprint, weights (--quantization int4, bfloat16)"
        assert f"prefill-0 and decode-0 are of different kinds: {why}" in pool.router.log_tail()
        # Decode nodes of both formats answer alone: the prefill node's KV is of no use to them.
        for _ in range(2):
            assert ask_all(pool, expected, formats) == {"decode-0", "decode-1"}
            settle(pool)
        assert state_of(pool, "decode-1")["differs"] == ["fingerprint", "weights"]
        seen = state_of(pool, "prefill-0")
        assert (seen["in_use"], seen["weights"]) == (False, "--quantization int4")
        # Once a format has nodes of both roles, all new requests use these two.
        join("prefill-1", "none")
        assert ask_all(pool, expected, formats) == {"decode-0", "prefill-1"}
        in_use = {each["id"] for each in pool.pool()["nodes"] if each["in_use"]}
        assert in_use == {"decode-0", "prefill-1"}


def answers(bench: Bench, format_: str) -> dict[str, Answer]:
    engine = bench.engine(quantization=format_)
    return {one.name: run(engine, [one.request()])[one.name, 0] for one in SUBJECTS}


def ask_all(
    pool: Cluster, expected: Mapping[str, Mapping[str, Answer]], formats: Mapping[str, str]
) -> set[str]:
    """Send all prompts at once, and compare each answer with its nodes' format. Returns the
    nodes."""
    pool.witness.forget()
    with ThreadPoolExecutor(len(SUBJECTS)) as threads:
        found_all = list(threads.map(lambda subject: send(pool, subject), SUBJECTS))
    nodes: set[str] = set()
    for subject, answer in zip(SUBJECTS, found_all, strict=True):
        used = {placed.node for placed in pool.witness.placements(subject.prompt)}
        [format_] = {formats[node] for node in used}
        found = answer_of(answer.result.choices[0], GREEDY.params)
        assert found == expected[format_][subject.name], (subject.name, used)
        nodes |= used
    return nodes


def state_of(pool: Cluster, name: str) -> dict[str, object]:
    return next((each for each in pool.pool()["nodes"] if each["id"] == name), {})
