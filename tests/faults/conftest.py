"""Pools that the fault tests of one file share. They are repaired after each test, not restarted.
All files share the undisturbed pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.engines.tiny_models import BRIDGE_MODELS
from tests.support.pools.processes import SIM, Cluster

# Slow enough that faults hit between two steps, and not in the middle of one.
SLOW_PREFILL = ("--sim-prefill-ms-per-token=1", "--max-batched-tokens=32")
SLOW_DECODE = ("--sim-decode-ms=10", "--overlap=on")
# The requests have priorities, and share the steps of prefill nodes.
BY_PRIORITY = "--scheduling-policy=priority"
PIECES = "--long-prefill-token-threshold=24"
# Shorter than a stream, so that the requests of a node that shuts down move.
SHORT_DRAIN = "--drain-timeout=0.05"
# The wait of those rows that freeze only an engine.
STALL = "--stall-timeout=4"
TORCH_MODEL = "llama-gqa4"
# What followed the last token where it last occurred, often wrongly; and what a grammar forces.
DRAFTS = (
    "--speculative-config",
    '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}',
)
EXACT = ("--batch-invariant", "on")


@pytest.fixture(scope="session")
def undisturbed() -> Iterator[Cluster]:
    """A pool of one fast node without a store, which gives the reference answers."""
    with Cluster(0, 1, flags=[*SIM, "--kv-blocks=4000"], store=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pool() -> Iterator[Cluster]:
    """Two nodes of each role; every request is handed off. One decode node drafts tokens, the other
    has no prefix cache."""
    cluster = Cluster(
        *(2, 2),
        own_flags={"decode-0": ["--no-enable-prefix-caching"], "decode-1": DRAFTS},
        prefill_flags=[*SLOW_PREFILL, SHORT_DRAIN, BY_PRIORITY, PIECES],
        decode_flags=[*SLOW_DECODE, SHORT_DRAIN, BY_PRIORITY],
        router_flags=["--handoff=always", STALL],
    )
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def torch_model(request: pytest.FixtureRequest) -> str:
    """A test may name another model as the fixture's parameter."""
    model: str = getattr(request, "param", TORCH_MODEL)
    return model


@pytest.fixture(scope="module")
def store_codec(request: pytest.FixtureRequest) -> str:
    """A test may have another codec as the fixture's parameter."""
    codec: str = getattr(request, "param", "none")
    return codec


@pytest.fixture(scope="module")
def drafting(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The decode nodes that draft tokens. A test may have others as the fixture's parameter."""
    nodes: tuple[str, ...] = getattr(request, "param", ())
    return nodes


@pytest.fixture(scope="module")
def torch_flags(torch_model: str, store_codec: str, tiny_model: Callable[[str], Path]) -> list[str]:
    bridged = torch_model in BRIDGE_MODELS
    arithmetic = ["--dtype", "float32"] if bridged else ["--dtype", "bfloat16", *EXACT]
    return [
        *("--model", str(tiny_model(torch_model)), *arithmetic),
        *("--threads", "1", "--chunk-blocks", "1", "--kv-blocks", "400"),
        *("--store-codec", store_codec),
    ]


@pytest.fixture(scope="module")
def torch_undisturbed(torch_flags: list[str]) -> Iterator[Cluster]:
    with Cluster(0, 1, flags=torch_flags, store=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def torch_pool(torch_flags: list[str], drafting: tuple[str, ...]) -> Iterator[Cluster]:
    cluster = Cluster(
        *(1, 2),
        flags=torch_flags,
        own_flags=dict.fromkeys(drafting, DRAFTS),
        prefill_flags=["--max-batched-tokens=32"],
        decode_flags=[SHORT_DRAIN],
        router_flags=["--handoff=always", STALL],
    )
    with cluster:
        yield cluster
