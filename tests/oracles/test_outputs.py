"""Outputs and streaming (O-OUT): detokenizer, the router's stream and output queue, logprobs and
usage."""

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

from baton_engine import RequestOutputKind, SamplingParams
from baton_engine.interface import TokenOut
from baton_engine.offline.running_request import RequestMaker
from baton_engine.sampling.logprobs import logprobs_of
from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta, Deltas, RequestStats, RunJob
from baton_router.errors import RequestFailed
from baton_router.requests.output_queue import OutputQueue
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from baton_text.artifacts import TOKENIZER, byte_artifacts
from baton_text.detokenizer import Detokenizer
from baton_text.tokenizer import Tokenizer
from tests.support.engines.offline import byte_text
from tests.support.nodes.fake_node import FakeNode, Script
from tests.support.waiting import WAIT_S, until

BYTES = Tokenizer.from_artifacts(byte_artifacts())


@pytest.mark.parametrize("char", ["é", "日", "😀"])  # 2, 3 and 4 bytes, one token per byte
def test_a_character_is_emitted_with_its_last_token_O_OUT_1(char: str) -> None:
    ids = list(char.encode())
    detokenizer = Detokenizer(BYTES)
    texts = [detokenizer.push([id]).text for id in ids]
    assert texts == [""] * (len(ids) - 1) + [char]


def test_deltas_add_up_to_the_full_decode_O_OUT_1() -> None:
    text = "Grüße aus 京都 😀."
    ids = BYTES.encode(text)
    detokenizer = Detokenizer(BYTES)
    streamed = "".join(detokenizer.push([id]).text for id in ids) + detokenizer.finish()
    assert streamed == BYTES.decode(ids) == text


def test_tokens_of_gpt_2_keep_their_leading_spaces_O_OUT_1b() -> None:
    """Five entries of GPT-2's vocabulary with their ids, in its byte-level alphabet."""
    vocab = {"Hello": 15496, "Ġto": 284, "Ġthe": 262, "Ġworld": 995, "!": 0}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_artifacts({TOKENIZER: backend.to_str().encode()})
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.push([id]).text for id in (15496, 284, 262, 995, 0)]
    assert texts == ["Hello", " to", " the", " world", "!"]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens_is_never_emitted_O_OUT_6(include: bool) -> None:
    detokenizer = Detokenizer(BYTES, stop=("STOP",), include_stop=include)
    texts = [detokenizer.push([id]).text for id in b"end STOP here"]
    assert detokenizer.stopped == "STOP"
    assert "".join(texts) == ("end STOP" if include else "end ")
    if not include:
        assert texts[4:] == [""] * 9


# --- a real router with a fake node whose deltas the test sends ---------------------------------


@asynccontextmanager
async def running_router() -> AsyncIterator[tuple[FakeNode, str, aiohttp.ClientSession]]:
    async with FakeNode("decode-0", "decode", Script(run="silent")) as node:
        settings = RouterSettings(port=0, nodes=(node.address,))
        async with Router(settings) as router, aiohttp.ClientSession() as session:
            await until(lambda: list(router.view.ready()))
            yield node, f"http://127.0.0.1:{router.port}/v1/chat/completions", session


async def send_deltas(node: FakeNode, *parts: tuple[int, str, str | None]) -> None:
    """Send the deltas (choice, text, finish) of the only request, with one id and frame each."""
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
    async with running_router() as (node, url, session):
        parts = [(0, "Hello", None), (0, " there", None), (0, "!", None), (0, "", "stop")]
        sending = asyncio.create_task(send_deltas(node, *parts))
        async with asyncio.timeout(WAIT_S), session.post(url, json=body(stream=True)) as response:
            events = (await response.text()).split("\n\n")
        await sending
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    contents = [(each["delta"].get("content", ""), each["finish_reason"]) for each in choices]
    assert contents == [("Hello", None), (" there", None), ("!", None), ("", "stop")]


@pytest.mark.integration
async def test_usage_counts_the_tokens_of_all_choices_O_OUT_5() -> None:
    async with running_router() as (node, url, session):
        parts = [(0, "a", None), (1, "b", None), (1, "c", None), (0, "d", "stop"), (1, "", "stop")]
        sending = asyncio.create_task(send_deltas(node, *parts))
        async with asyncio.timeout(WAIT_S), session.post(url, json=body(n=2)) as response:
            completion = await response.json()
        await sending
        [job] = node.got_of(RunJob)
    assert [each["message"]["content"] for each in completion["choices"]] == ["ad", "bc"]
    prompt, usage = len(job.request.prompt_ids), completion["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 5)
    assert usage["total_tokens"] == prompt + 5


# --- the output queue ---------------------------------------------------------------------------


def piece(offset: int, text: str) -> Delta:
    return Delta(request=RequestId("r"), attempt=1, choice=0, offset=offset, text=text)


def text_of(batch: Sequence[tuple[int, Delta]]) -> str:
    return "".join(delta.text for _, delta in batch)


async def test_the_reader_gets_all_queued_items_at_once_O_OUT_3() -> None:
    queue = OutputQueue(1)
    queue.put_delta(0, piece(0, "a"))
    queue.put_delta(0, piece(1, "b"))
    assert text_of(await queue.next_batch()) == "ab"
    queue.end_request()
    assert await queue.next_batch() == []


@pytest.mark.parametrize(
    ("kind", "last_text"), [(RequestOutputKind.CUMULATIVE, "abc"), (RequestOutputKind.DELTA, "c")]
)
def test_two_tokens_before_a_read_are_one_output_O_OUT_3_O_OUT_3b(
    kind: RequestOutputKind, last_text: str
) -> None:
    """In the offline API: of two cumulative outputs the later, of two deltas their sum."""
    params = SamplingParams(max_tokens=3, output_kind=kind)
    running = RequestMaker(byte_text()).make(RequestId("a"), "a", "hello", params, (0.0, 0.0))
    assert running.output() is None
    for offset, char in enumerate("ab"):
        running.take(TokenOut(running.id, 0, 0, offset, ord(char)), 1.0)
    output = running.output()
    assert output is not None
    assert [choice.text for choice in output.outputs] == ["ab"]
    assert running.output() is None
    running.take(TokenOut(running.id, 0, 0, 2, ord("c"), finish="length"), 2.0)
    last = running.output()
    assert last is not None
    assert (last.outputs[0].text, last.finished) == (last_text, True)


async def test_the_reader_of_an_empty_queue_waits_for_a_put_O_OUT_3c() -> None:
    queue = OutputQueue(1)
    reading = asyncio.create_task(queue.next_batch())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not reading.done()
    queue.put_delta(0, piece(0, "a"))
    async with asyncio.timeout(WAIT_S):
        assert text_of(await reading) == "a"


async def test_an_error_wakes_the_reader_O_OUT_3d() -> None:
    queue = OutputQueue(1)
    reading = asyncio.create_task(queue.next_batch())
    await asyncio.sleep(0)
    queue.put_error(ErrorRecord("gone", "engine_error"))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(RequestFailed, match="gone"):
            await reading


async def test_items_queued_before_an_error_are_read_before_it_O_OUT_3d() -> None:
    queue = OutputQueue(1)
    queue.put_delta(0, piece(0, "a"))
    queue.put_error(ErrorRecord("gone", "engine_error"))
    assert text_of(await queue.next_batch()) == "a"
    with pytest.raises(RequestFailed):
        await queue.next_batch()


def test_logprobs_have_the_expected_ranks_O_OUT_4() -> None:
    logits = torch.tensor([[0.5, 2.0, 0.1, 1.0]] * 2)
    logprobs = logprobs_of(logits, torch.tensor([2, 1]), 3).read([2, 1], [3, 3])
    for actual, (id, rank) in zip(logprobs, [(2, 4), (1, 1)], strict=True):
        assert (actual.sampled.id, actual.sampled.rank) == (id, rank)
        assert [(each.id, each.rank) for each in actual.top] == [(1, 1), (3, 2), (0, 3)]
