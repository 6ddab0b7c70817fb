"""Outputs and streaming (O-OUT): detokenizer, the router's stream, its outbox, logprobs, usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from baton_engine.sampling.logprobs import logprobs_of
from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta, Deltas, RequestStats, RunJob
from baton_router.errors import RequestFailed
from baton_router.requests.in_flight import OutputQueue
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from baton_text.artifacts import TOKENIZER, byte_artifacts
from baton_text.detokenizer import Detokenizer
from baton_text.tokenizer import Tokenizer
from tests.support.nodes.fake_node import FakeNode, Script
from tests.support.waiting import WAIT_S, until

BYTES = Tokenizer.from_artifacts(byte_artifacts())


@pytest.mark.parametrize("char", ["é", "日", "😀"])  # 2, 3 and 4 bytes, a token each
def test_a_character_is_shown_when_its_last_token_is_here_O_OUT_1(char: str) -> None:
    ids = list(char.encode())
    detokenizer = Detokenizer(BYTES)
    shown = [detokenizer.push([id]).text for id in ids]
    assert shown == [""] * (len(ids) - 1) + [char]


def test_deltas_add_up_to_the_full_decode_O_OUT_1() -> None:
    text = "Grüße aus 京都 😀."
    ids = BYTES.encode(text)
    detokenizer = Detokenizer(BYTES)
    shown = "".join(detokenizer.push([id]).text for id in ids) + detokenizer.finish()
    assert shown == BYTES.decode(ids) == text


def test_words_of_gpt_2_O_OUT_1b() -> None:
    """Five of GPT-2's entries under their own ids, spelled in its alphabet."""
    words = {"Hello": 15496, "Ġto": 284, "Ġthe": 262, "Ġworld": 995, "!": 0}
    backend = Backend(models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_artifacts({TOKENIZER: backend.to_str().encode()})
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.push([id]).text for id in (15496, 284, 262, 995, 0)]
    assert shown == ["Hello", " to", " the", " world", "!"]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens_is_never_seen_O_OUT_6(include: bool) -> None:
    detokenizer = Detokenizer(BYTES, stop=("STOP",), include_stop=include)
    shown = [detokenizer.push([id]).text for id in b"end STOP here"]
    assert detokenizer.stopped == "STOP"
    assert "".join(shown) == ("end STOP" if include else "end ")
    if not include:
        assert shown[4:] == [""] * 9


# --- a real router before a node that says what the test has it say -----------------------------


@asynccontextmanager
async def served() -> AsyncIterator[tuple[FakeNode, str, aiohttp.ClientSession]]:
    async with FakeNode("decode-0", "decode", Script(run="silent")) as node:
        settings = RouterSettings(port=0, nodes=(node.address,))
        async with Router(settings) as router, aiohttp.ClientSession() as session:
            await until(lambda: list(router.view.ready()))
            yield node, f"http://127.0.0.1:{router.port}/v1/chat/completions", session


async def say(node: FakeNode, *parts: tuple[int, str, str | None]) -> None:
    """Deltas (choice, text, finish) of the only request, one id each, a frame for each."""
    await until(lambda: node.got_of(RunJob))
    [job] = node.got_of(RunJob)
    offsets = [0] * job.request.params.n
    for index, (choice, text, finish) in enumerate(parts):
        last = index + 1 == len(parts)
        delta = Delta(
            request=job.request.id,
            attempt=job.request.attempt,
            choice=choice,
            offset=offsets[choice],
            ids=(65,),
            text=text,
            finish=finish,  # type: ignore[arg-type]
            stats=RequestStats(prompt_tokens=len(job.request.prompt_ids)) if last else None,
        )
        offsets[choice] += 1
        await node.say(Deltas((delta,)))


def body(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **changes}


@pytest.mark.integration
async def test_a_chat_stream_ends_with_an_empty_delta_and_done_O_OUT_2() -> None:
    async with served() as (node, url, session):
        parts = [(0, "Hello", None), (0, " there", None), (0, "!", None), (0, "", "stop")]
        saying = asyncio.create_task(say(node, *parts))
        async with asyncio.timeout(WAIT_S), session.post(url, json=body(stream=True)) as response:
            events = (await response.text()).split("\n\n")
        await saying
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = [(each["delta"].get("content", ""), each["finish_reason"]) for each in choices]
    assert said == [("Hello", None), (" there", None), ("!", None), ("", "stop")]


@pytest.mark.integration
async def test_usage_counts_every_sequence_O_OUT_5() -> None:
    async with served() as (node, url, session):
        parts = [(0, "a", None), (1, "b", None), (1, "c", None), (0, "d", "stop"), (1, "", "stop")]
        saying = asyncio.create_task(say(node, *parts))
        async with asyncio.timeout(WAIT_S), session.post(url, json=body(n=2)) as response:
            answer = await response.json()
        await saying
        [job] = node.got_of(RunJob)
    assert [each["message"]["content"] for each in answer["choices"]] == ["ad", "bc"]
    prompt, usage = len(job.request.prompt_ids), answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 5)
    assert usage["total_tokens"] == prompt + 5


# --- the collector ------------------------------------------------------------------------------


def piece(offset: int, text: str) -> Delta:
    return Delta(request=RequestId("r"), attempt=1, choice=0, offset=offset, text=text)


def text_of(batch: Sequence[tuple[int, Delta]]) -> str:
    return "".join(delta.text for _, delta in batch)


async def test_what_was_put_twice_is_got_at_once_O_OUT_3() -> None:
    outbox = OutputQueue(1)
    outbox.put(0, piece(0, "a"))
    outbox.put(0, piece(1, "b"))
    assert text_of(await outbox.next()) == "ab"
    outbox.end()
    assert await outbox.next() == []


async def test_a_reader_of_nothing_waits_for_a_put_O_OUT_3c() -> None:
    outbox = OutputQueue(1)
    reading = asyncio.create_task(outbox.next())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not reading.done()
    outbox.put(0, piece(0, "a"))
    async with asyncio.timeout(WAIT_S):
        assert text_of(await reading) == "a"


async def test_an_error_wakes_the_reader_O_OUT_3d() -> None:
    outbox = OutputQueue(1)
    reading = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    outbox.fail(ErrorRecord("gone", "engine_error"))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(RequestFailed, match="gone"):
            await reading


async def test_what_was_put_before_an_error_is_got_before_it_O_OUT_3d() -> None:
    outbox = OutputQueue(1)
    outbox.put(0, piece(0, "a"))
    outbox.fail(ErrorRecord("gone", "engine_error"))
    assert text_of(await outbox.next()) == "a"
    with pytest.raises(RequestFailed):
        await outbox.next()


def test_ranks_of_logprobs_O_OUT_4() -> None:
    logits = torch.tensor([[0.5, 2.0, 0.1, 1.0]] * 2)
    told = logprobs_of(logits, torch.tensor([2, 1]), 3).read([2, 1], [3, 3])
    for found, (id, rank) in zip(told, [(2, 4), (1, 1)], strict=True):
        assert (found.sampled.id, found.sampled.rank) == (id, rank)
        assert [(each.id, each.rank) for each in found.top] == [(1, 1), (3, 2), (0, 3)]
