"""Requests to pooling models, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_engine.core.engine_core import EngineCore
from baton_protocol.ids import RequestId
from baton_protocol.pooling import PoolingParams
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from tests.support.engines.engine_core import run_all


def pooling_request(name: str, prompt: Sequence[int], **params: Any) -> Request:
    """`params` are those of PoolingParams."""
    return Request(
        id=RequestId(name),
        attempt=1,
        prompt_ids=tuple(prompt),
        params=SamplingParams(),
        outputs=((),),
        pooling=PoolingParams(**params),
    )


def vectors(engine: EngineCore, prompts: Sequence[Sequence[int]], **params: Any) -> list[bytes]:
    """The answers to prompts that run together."""
    requests = [pooling_request(str(n), prompt, **params) for n, prompt in enumerate(prompts)]
    run = run_all(engine, requests)
    found = {each.request: each for each in run.complete}
    assert all((each.finish, each.offset) == ("stop", 0) for each in found.values())
    assert sorted(run.finished) == sorted(found) == sorted(each.id for each in requests)
    return [found[each.id].vector for each in requests]


def vectors_alone(
    engine: EngineCore, prompts: Sequence[Sequence[int]], **params: Any
) -> list[bytes]:
    """The answers to prompts that run one after the other, each without a cached prefix."""
    alone = []
    for prompt in prompts:
        engine.reset_prefix_cache()
        alone += vectors(engine, [prompt], **params)
    return alone
