"""A call of many prompts and choices is admitted prompt by prompt, with other calls in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.link import Delta, Deltas, RunJob
from baton_router.admission.capacity import AdmittedLoad
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

COMPLETIONS = "/v1/completions"
HEAVY, LIGHT = {"Authorization": "Bearer sk-heavy"}, {"Authorization": "Bearer sk-light"}


@pytest.fixture
async def small() -> AsyncIterator[FakeNode]:
    """A node that runs 8 sequences and does not answer by itself."""
    async with FakeNode("decode-0", "decode", max_num_seqs=8) as node:
        node.script.run = "silent"
        yield node


@pytest.fixture
def tenants(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "keys").write_text("heavy sk-heavy\nlight sk-light\n")
    (tmp_path / "limits").write_text("[tenants.light]\nweight = 10\npriority = 10\n")
    return {"api_keys": str(tmp_path / "keys"), "tenants": str(tmp_path / "limits")}


def body(prompts: list[str] | str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompts, "max_tokens": 2} | fields


def prompt_texts(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def jobs(node: FakeNode) -> list[RunJob]:
    return node.got_of(RunJob)


def prompts(node: FakeNode) -> list[str]:
    return [bytes(job.request.prompt_ids).decode() for job in jobs(node)]


async def post(client: pools.Client, call: Any, headers: Any = None) -> asyncio.Task[pools.Reply]:
    task = asyncio.create_task(client.post(COMPLETIONS, call, headers))
    await asyncio.sleep(0)
    return task


async def finish(node: FakeNode, job: RunJob, *choices: int) -> None:
    """Send both tokens of these choices (default: all): the choice's number, twice."""
    request = job.request
    for choice in choices or range(request.params.n):
        text = f"{choice % 10}" * 2
        ids = tuple(text.encode())
        await node.say(
            Deltas((Delta(request.id, request.attempt, choice, 0, ids, text, finish="length"),))
        )


async def until_released(client: pools.Client) -> None:
    """Wait until every call is over, and check that all its load is released."""
    admission = client.router.admission
    await until_is(client.unfinished, 0)
    await until_is(client.queued, 0)
    assert admission._pending == AdmittedLoad()
    assert len(admission._running) == 0
    assert all(not node.sequences for node in client.router.view.nodes.values())


async def leave(client: pools.Client, *tasks: asyncio.Task[pools.Reply]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until_released(client)


async def test_a_call_of_many_sequences_does_not_block_another_tenant(
    small: FakeNode, tenants: dict[str, Any]
) -> None:
    """The heavy tenant leaves an eighth of the node's sequences free."""
    async with pools.running(small, queue_timeout_s=5.0, **tenants) as client:
        heavy = await post(client, body(prompt_texts(64), n=2), HEAVY)
        await until(lambda: len(jobs(small)) == 3)
        light = await post(client, body("light"), LIGHT)
        await until(lambda: light.done() or "light" in prompts(small))
        assert prompts(small) == ["p0", "p1", "p2", "light"]
        await finish(small, jobs(small)[3])
        assert (await light)[0] == 200
        await leave(client, heavy)


async def test_prompts_start_as_earlier_ones_end_and_choices_keep_their_numbers(
    small: FakeNode,
) -> None:
    async with pools.running(small) as client:
        call = await post(client, body(prompt_texts(10), n=3))
        done = 0
        while not call.done():
            await until(lambda: call.done() or len(jobs(small)) > done)  # noqa: B023
            assert sum(node.sequences for node in client.router.view.nodes.values()) <= 8
            for job in reversed(jobs(small)[done:]):
                await finish(small, job)
                done += 1
        status, reply, _ = await call
        assert status == 200
        assert [choice["index"] for choice in reply["choices"]] == list(range(30))
        assert [choice["text"] for choice in reply["choices"]] == ["00", "11", "22"] * 10
        assert reply["usage"]["prompt_tokens"] == 20
        assert reply["usage"]["completion_tokens"] == 60
        assert prompts(small) == prompt_texts(10)
        await until_released(client)


async def test_a_stream_gets_running_prompts_tokens_and_keep_alives_while_others_wait(
    small: FakeNode,
) -> None:
    call = body(prompt_texts(3), n=4, stream=True)
    async with pools.running(small, keepalive_s=0.05, queue_timeout_s=0.1) as client:
        async with client.session.post(client.url + COMPLETIONS, json=call) as response:
            await until(lambda: len(jobs(small)) == 2)
            await finish(small, jobs(small)[1], 2)
            lines = [line async for line in _until(response.content, b": waiting")]
            assert _indices(lines) == [6]
            for job in jobs(small)[:2]:
                await finish(small, job)
            await until(lambda: len(jobs(small)) == 3)
            await finish(small, jobs(small)[2])
            lines += (await response.content.read()).splitlines()
        assert sorted(_indices(lines)) == list(range(12))
        assert lines[-2] == b"data: [DONE]"
        await until_released(client)


async def _until(content: Any, start: bytes) -> AsyncIterator[bytes]:
    """Lines up to the first one that begins with `start` and follows an event."""
    events = 0
    async for line in content:
        yield line.rstrip()
        events += line.startswith(b"data: ")
        if events and line.startswith(start):
            return


def _indices(lines: list[bytes]) -> list[int]:
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return [choice["index"] for event in events for choice in event["choices"]]


async def test_a_finished_choice_frees_its_sequence_before_its_prompt_ends(small: FakeNode) -> None:
    async with pools.running(small) as client:
        call = await post(client, body("wide", n=4))
        tasks = [call, *[await post(client, body(name)) for name in prompt_texts(5)]]
        await until(lambda: len(jobs(small)) == 5)
        await until_is(client.queued, 1)
        wide = next(job for job in jobs(small) if job.request.params.n == 4)
        await finish(small, wide, 1)
        await until(lambda: len(jobs(small)) == 6)
        await leave(client, *tasks)


async def test_a_prompt_waits_for_room_for_all_its_choices_and_is_not_overtaken(
    small: FakeNode,
) -> None:
    async with pools.running(small) as client:
        tasks = [await post(client, body(name)) for name in prompt_texts(5)]
        await until(lambda: len(jobs(small)) == 5)
        tasks.append(await post(client, body("wide", n=4)))
        await until_is(client.queued, 1)
        tasks.append(await post(client, body("narrow")))
        await until_is(client.queued, 2)
        await finish(small, jobs(small)[0])
        await until(lambda: "wide" in prompts(small))
        assert "narrow" not in prompts(small)
        await leave(client, *tasks)


@pytest.mark.parametrize("n", [8, 9, 128])
async def test_a_prompt_with_more_choices_than_a_node_runs_starts_on_a_busy_node(
    small: FakeNode, n: int
) -> None:
    async with pools.running(small) as client:
        tasks = [await post(client, body(name)) for name in prompt_texts(5)]
        await until(lambda: len(jobs(small)) == 5)
        tasks.append(await post(client, body("wide", n=n)))
        await until_is(client.queued, 1)
        await finish(small, jobs(small)[0])
        await until(lambda: "wide" in prompts(small))
        await leave(client, *tasks)


async def test_calls_of_one_tenant_take_turns_prompt_by_prompt(small: FakeNode) -> None:
    async with pools.running(small, max_inflight=1) as client:
        tasks = [await post(client, body(["a0", "a1", "a2"]))]
        await until_is(client.queued, 1)
        tasks.append(await post(client, body(["b0", "b1", "b2"])))
        await until_is(client.queued, 2)
        assert await client.held() == 5
        for number in range(6):
            await until(lambda: len(jobs(small)) > number)  # noqa: B023
            await finish(small, jobs(small)[number])
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200, 200]
        assert prompts(small) == ["a0", "a1", "b0", "a2", "b1", "b2"]
        await until_released(client)


async def test_a_call_that_has_begun_is_neither_timed_out_nor_evicted_from_a_full_queue(
    small: FakeNode, tenants: dict[str, Any]
) -> None:
    settings = {"max_inflight": 1, "max_queued": 1, "queue_timeout_s": 0.2}
    async with pools.running(small, **settings, **tenants) as client:
        heavy = await post(client, body(prompt_texts(3)), HEAVY)
        await until_is(client.queued, 1)
        for _ in range(2):  # takes the only place: a call that has begun needs none
            status, reply, _ = await client.post(COMPLETIONS, body("light"), LIGHT)
            assert (status, reply["error"]["code"]) == (503, "queue_timeout")
        for number in range(3):
            await until(lambda: len(jobs(small)) > number)  # noqa: B023
            await finish(small, jobs(small)[number])
        assert (await heavy)[0] == 200
        await until_released(client)


async def test_a_disconnect_releases_the_call_s_running_and_waiting_prompts(
    small: FakeNode,
) -> None:
    async with pools.running(small) as client:
        call = await post(client, body(prompt_texts(20), n=2))
        await until(lambda: len(jobs(small)) == 4)
        await leave(client, call)
        assert len(jobs(small)) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_ends_at_its_deadline_even_if_none_of_its_prompts_runs(
    small: FakeNode, stream: bool
) -> None:
    async with pools.running(small, max_inflight=1, request_timeout_s=5.0) as client:
        other = await post(client, body("other", max_tokens=1))
        await until(lambda: len(jobs(small)) == 1)
        two_prompts = body(["first", "second"], stream=stream)
        call = asyncio.create_task(client.session.post(client.url + COMPLETIONS, json=two_prompts))
        await until_is(client.queued, 1)
        last = await post(client, body("last"))  # between the call's two prompts
        await until_is(client.queued, 2)
        await finish(small, jobs(small)[0])
        await until(lambda: len(jobs(small)) == 2)
        await finish(small, jobs(small)[1])
        await until(lambda: len(jobs(small)) == 3)
        assert prompts(small) == ["other", "first", "last"]
        response = await call
        assert response.status == (200 if stream else 504)
        assert "deadline_exceeded" in await response.text()
        await leave(client, other, last)


async def test_a_failed_prompt_ends_its_call_and_the_call_s_waiting_prompts(
    small: FakeNode,
) -> None:
    async with pools.running(small) as client:
        many_prompts = body(prompt_texts(20), n=2, stream=True)
        call = asyncio.create_task(client.session.post(client.url + COMPLETIONS, json=many_prompts))
        await until(lambda: len(jobs(small)) == 4)
        await finish(small, jobs(small)[0], 0)
        small.script.run = "fail"
        await finish(small, jobs(small)[0], 1)
        reply = await (await call).text()
        assert '"code":"engine_error"' in reply
        assert "[DONE]" not in reply
        await until_released(client)
        # The failed prompt's place may go to the next prompt before the call ends.
        assert len(jobs(small)) in (5, 6)


async def test_at_shutdown_calls_with_waiting_prompts_fail_with_503(small: FakeNode) -> None:
    async with pools.running(small) as client:
        call = await post(client, body(prompt_texts(20), n=2))
        await until(lambda: len(jobs(small)) == 4)
        client.router.admission.refuse_waiting()
        status, reply, _ = await call
        assert (status, reply["error"]["code"]) == (503, "unavailable")
        await until_released(client)


SEQUENCE_LIMITS = [
    ({}, 64, 32, 2048, None),
    ({}, 65, 32, 2048, 2080),
    ({"max_call_sequences": 8}, 1, 9, 8, 9),
    ({"max_call_sequences": 8}, 9, 1, 8, 9),
    ({"max_call_sequences": 8}, 4, 2, 8, None),
]


@pytest.mark.parametrize(("settings", "count", "n", "limit", "sequences"), SEQUENCE_LIMITS)
async def test_a_call_may_ask_for_at_most_max_call_sequences(
    decode: FakeNode,
    settings: dict[str, Any],
    count: int,
    n: int,
    limit: int,
    sequences: int | None,
) -> None:
    async with pools.running(decode, **settings) as client:
        status, reply, _ = await client.post(COMPLETIONS, body(["x"] * count, n=n, max_tokens=1))
        if sequences is None:
            assert status == 200
            return
        error = reply["error"]
        assert (status, error["code"]) == (400, "too_many_sequences")
        assert f"{sequences} sequences; one call may have at most {limit}" in error["message"]
        assert error["param"] == ("prompt" if count > 1 else "n")
        assert jobs(decode) == []


async def test_a_tenant_may_have_its_own_limit_of_sequences(
    decode: FakeNode, tenants: dict[str, Any]
) -> None:
    Path(tenants["tenants"]).write_text("[tenants.heavy]\nmax_call_sequences = 3\n")
    async with pools.running(decode, max_call_sequences=4, **tenants) as client:
        for headers, n, status in ((HEAVY, 3, 200), (HEAVY, 4, 400), (LIGHT, 4, 200)):
            assert (await client.post(COMPLETIONS, body("x", n=n), headers))[0] == status


async def test_a_call_is_charged_its_maximum_cost_before_it_starts(
    decode: FakeNode, tenants: dict[str, Any]
) -> None:
    """The budget is 6,000 tokens per minute; the call has 256 prompts of 2 tokens with 64 choices
    of 2 tokens."""
    limits = "[tenants.heavy]\ntokens_per_minute = 6000\n[tenants.light]\nrequests_per_minute = 5"
    Path(tenants["tenants"]).write_text(limits)
    async with pools.running(decode, max_call_sequences=16384, **tenants) as client:
        big = body(["x0"] * 256, n=64)
        status, reply, _ = await client.post(COMPLETIONS, big, HEAVY)
        assert (status, reply["error"]["code"]) == (400, "over_budget")
        assert "this call can cost 33280 tokens" in reply["error"]["message"]
        assert "6000 tokens per minute never holds more than 6000" in reply["error"]["message"]
        status, reply, _ = await client.post(COMPLETIONS, body(prompt_texts(6)), LIGHT)
        assert (status, reply["error"]["code"]) == (400, "over_budget")
        assert "this call can cost 6 requests" in reply["error"]["message"]
        assert jobs(decode) == []
        decode.script.run = "silent"
        small = await post(client, body(["x0"] * 16, n=2, max_tokens=100), HEAVY)
        await until(lambda: len(jobs(decode)) == 16)
        status, reply, headers = await client.post(COMPLETIONS, body("x"), HEAVY)
        assert (status, reply["error"]["code"]) == (429, "rate_limited")
        assert 1 < int(headers["retry-after"]) <= 30  # 16 x (2 + 200) tokens minus the burst of 300
        await leave(client, small)
