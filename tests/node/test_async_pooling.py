"""AsyncLLM with pooling models: what LLM answers, from an engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton_engine import LLM, PoolingParams
from baton_engine.config.engine_config import SimConfig
from baton_engine.interface import PauseMode
from baton_node import AsyncLLM, EngineDeadError
from baton_protocol.errors import InvalidRequest, PromptTooLong, Unavailable
from tests.support.engines.offline import sim_llm_engine
from tests.support.waiting import until

pytestmark = pytest.mark.integration

TEXTS = ["the prefill node", "a name for every chunk", "always"]
SLOW = "x" * 8000


def pooling_llm(classes: int = 0, **sim: Any) -> AsyncLLM:
    config = SimConfig(classes=classes, **sim)
    return AsyncLLM(engine="sim", runner="pooling", kv_blocks=2000, sim=config)


def in_process(classes: int = 0) -> LLM:
    return LLM.from_engine(sim_llm_engine(runner="pooling", classes=classes))


async def test_vectors_and_their_scores_are_those_of_llm() -> None:
    ours = in_process()
    async with pooling_llm() as llm:
        several = [llm.embed(TEXTS), llm.embed(TEXTS[0]), llm.embed([1, 2, 3])]
        found = await asyncio.gather(*several)
        expected = [ours.embed(each) for each in (TEXTS, TEXTS[0], [1, 2, 3])]
        assert [[one.outputs for one in each] for each in found] == [
            [one.outputs for one in each] for each in expected
        ]
        assert [each.prompt_token_ids for each in found[0]] == [[*text.encode()] for text in TEXTS]
        scores = await llm.score(TEXTS[0], TEXTS)
        assert [one.outputs for one in scores] == [
            one.outputs for one in ours.score(TEXTS[0], TEXTS)
        ]
        params = PoolingParams(dimensions=3, normalize=False)
        [output] = [each async for each in llm.encode(TEXTS[0], params, "mine")]
        [whole] = ours.encode(TEXTS[0], params)
        assert (output.request_id, output.finished) == ("mine", True)
        assert output.outputs.data.tolist() == whole.outputs.data.tolist()
        assert llm.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("classes", [1, 3])
async def test_classes_are_those_of_llm(classes: int) -> None:
    ours = in_process(classes)
    async with pooling_llm(classes) as llm:
        found = await llm.classify(TEXTS, pooling_params=[PoolingParams(activate=False)] * 3)
        plain = ours.classify(TEXTS, pooling_params=PoolingParams(activate=False))
        assert [each.outputs for each in found] == [each.outputs for each in plain]
        if classes == 1:
            scores = [each.outputs for each in await llm.score(TEXTS[0], TEXTS[1:])]
            assert scores == [each.outputs for each in ours.score(TEXTS[0], TEXTS[1:])]
            return
        with pytest.raises(InvalidRequest, match="needs a model with one class"):
            await llm.score("a", "b")


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda llm: llm.classify("a"), InvalidRequest, "use embed"),
        (lambda llm: llm.embed(["a", SLOW * 20]), PromptTooLong, "at most"),
        (lambda llm: llm.embed([[1], [7000]]), InvalidRequest, "token id 7000"),
        (
            lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions=999)),
            InvalidRequest,
            "dimensions is 999",
        ),
        (
            lambda llm: llm.embed(["a"], pooling_params=[PoolingParams()] * 2),
            ValueError,
            "1 prompts and 2",
        ),
        (lambda llm: llm.score(["a", "b"], ["c"] * 3), InvalidRequest, "2 first and 3 second"),
    ],
)
async def test_a_call_that_cannot_be_answered_raises_and_leaves_no_prompt_behind(
    act: Callable[[AsyncLLM], Awaitable[Any]], error: type[Exception], message: str
) -> None:
    async with pooling_llm() as llm:
        with pytest.raises(error, match=message):
            await act(llm)
        assert llm.get_num_unfinished_requests() == 0
        assert len(await llm.embed("a")) == 1


async def test_tokens_and_vectors_need_different_models() -> None:
    async with AsyncLLM(engine="sim", kv_blocks=100) as llm:
        with pytest.raises(InvalidRequest, match="this one generates tokens"):
            await llm.embed("a")
        with pytest.raises(InvalidRequest, match="this one generates tokens"):
            [each async for each in llm.encode("a")]


@pytest.mark.parametrize("how", ["abort", "cancel", "sleep", "shutdown"])
async def test_a_call_that_is_ended_early_says_so_and_the_next_one_is_answered(how: str) -> None:
    async with pooling_llm(prefill_ms_per_token=1.0) as llm:
        await llm.start()
        waiting = asyncio.create_task(anext(llm.encode(SLOW, request_id="slow")))
        await until(lambda: llm.get_num_unfinished_requests() == 1)
        match how:
            case "abort":
                await llm.abort("another")
                await llm.abort("slow")
            case "cancel":
                waiting.cancel()
            case "sleep":
                await llm.sleep()
            case "shutdown":
                llm.shutdown()
        errors = {"cancel": asyncio.CancelledError, "shutdown": EngineDeadError}
        with pytest.raises(errors.get(how, Unavailable)):
            await waiting
        assert llm.get_num_unfinished_requests() == 0
        if how != "shutdown":
            await llm.wake_up()
            assert len(await llm.embed("a")) == 1


@pytest.mark.parametrize("mode", ["wait"])
async def test_a_sleep_may_wait_for_vectors(mode: PauseMode) -> None:
    async with pooling_llm() as llm:
        await llm.start()
        waiting = asyncio.create_task(llm.embed(TEXTS * 10))
        await until(lambda: llm.get_num_unfinished_requests() == 30)
        await llm.sleep(mode=mode)
        assert len(await waiting) == 30
        assert await llm.is_sleeping()
