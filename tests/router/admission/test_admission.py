"""Admission over HTTP: who waits while every node is full, in which order, and what others hear."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton_protocol.link import PrefillJob, RunJob
from baton_protocol.store import Speeds
from baton_router.admission.admission import AdmittedLoad
from baton_text.tokenizer import LONG_TEXT, Tokenizer
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import WAIT_S, until, until_is

pytestmark = pytest.mark.integration

ACME, GLOBEX, OPS = "sk-acme", "sk-globex", "sk-ops"
COMPLETIONS = "/v1/completions"
Reply = tuple[int, Any, dict[str, str]]


@pytest.fixture
def keyed(tmp_path: Path) -> dict[str, Any]:
    """Settings of a router with tenants, whose limits tests write."""
    (tmp_path / "keys").write_text(f"acme {ACME}\nglobex {GLOBEX}\nops {OPS} admin\n")
    (tmp_path / "limits").write_text("")
    return {"api_keys": str(tmp_path / "keys"), "tenants": str(tmp_path / "limits")}


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 2} | fields


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def prompts(node: FakeNode) -> list[str]:
    return [bytes(job.request.prompt_ids).decode() for job in node.got_of(RunJob)]


async def ask(client: Any, prompt: str, key: str = "", **fields: Any) -> asyncio.Task[Reply]:
    """Send it, and wait until the router has it on a node or in its queue."""

    async def there() -> int:
        return int(await client.queued() + await client.unfinished())

    before = await there()
    asked = client.post(COMPLETIONS, body(prompt, **fields), bearer(key) if key else None)
    task = asyncio.create_task(asked)
    async with asyncio.timeout(WAIT_S):
        while not task.done() and await there() <= before:
            await asyncio.sleep(0.01)
    return task


def occupy(node: FakeNode) -> None:
    """What it gets from now on it keeps for itself."""
    node.script.run = "silent"


async def finish(client: Any, *tasks: asyncio.Task[Reply]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until_is(client.unfinished, 0)


async def test_a_pool_with_room_lets_everybody_in_at_once(running: Any, decode: FakeNode) -> None:
    occupy(decode)
    async with running(decode) as client:
        asked = [client.post(COMPLETIONS, body(f"p{n}")) for n in range(50)]
        tasks = [asyncio.create_task(each) for each in asked]
        await until(lambda: len(decode.got_of(RunJob)) == 50)
        assert await client.queued() == 0
        await finish(client, *tasks)


async def test_while_every_node_is_full_requests_wait_and_go_in_as_they_came(
    running: Any, decode: FakeNode
) -> None:
    occupy(decode)
    async with running(decode, max_inflight=1) as client:
        first = await ask(client, "first")
        tasks = [await ask(client, f"p{n}") for n in range(3)]
        assert await client.queued() == 3
        assert await client.held() == 3
        assert prompts(decode) == ["first"]
        decode.script.run = "answer"
        await finish_one(first)
        reply = await asyncio.gather(*tasks)
    assert [status for status, _, _ in reply] == [200] * 3
    assert prompts(decode) == ["first", "p0", "p1", "p2"]


async def finish_one(task: asyncio.Task[Reply]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_burst_is_let_in_no_faster_than_it_is_booked(
    running: Any, decode: FakeNode, other: FakeNode
) -> None:
    """Between a turn and its booking the index is asked; who comes meanwhile must not slip in."""
    decode.script.token_s = other.script.token_s = 0.002
    async with running(decode, other, max_inflight=2) as client:
        nodes = client.router.view.nodes.values()
        asked = [client.post(COMPLETIONS, body(f"p{n}")) for n in range(40)]
        burst = asyncio.gather(*asked)
        most = 0
        while not burst.done():
            most = max(most, sum(node.sequences for node in nodes))
            await asyncio.sleep(0)
        assert [status for status, _, _ in burst.result()] == [200] * 40
        assert most == 4
        assert client.router.admission._pending == AdmittedLoad()


async def test_a_long_text_is_tokenized_beside_the_short_ones(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, encode = threading.Event(), Tokenizer.encode_up_to

    def held(self: Tokenizer, text: str, *rest: Any) -> tuple[list[int], bool]:
        if len(text) > LONG_TEXT:
            assert gate.wait(120)
        return encode(self, text, *rest)

    monkeypatch.setattr(Tokenizer, "encode_up_to", held)
    roomy = FakeNode("decode-0", "decode", max_model_len=2 * LONG_TEXT)
    async with roomy, running(roomy) as client:
        long = asyncio.create_task(client.post(COMPLETIONS, body("x" * (LONG_TEXT + 1))))
        try:
            await until_is(client.answering, 1)
            assert (await client.post(COMPLETIONS, body("short")))[0] == 200
            assert not long.done()
        finally:
            gate.set()
        assert (await long)[0] == 200


async def test_a_node_says_itself_how_many_sequences_fill_it(running: Any) -> None:
    async with FakeNode("decode-0", "decode", max_num_seqs=2) as node:
        occupy(node)
        async with running(node) as client:
            tasks = [await ask(client, f"p{n}") for n in range(3)]
            assert prompts(node) == ["p0", "p1"]
            assert await client.queued() == 1
            await finish(client, *tasks)


async def test_prompts_for_longer_than_is_allowed_fill_a_node(
    running: Any, decode: FakeNode
) -> None:
    """It computes 10,000 tokens a second, so these are 10 ms."""
    occupy(decode)
    async with running(decode, admission_queue_ms=10) as client:
        tasks = [await ask(client, "x" * 100), await ask(client, "second")]
        assert (len(prompts(decode)), await client.queued()) == (1, 1)
        await finish(client, *tasks)


async def test_a_stream_that_waits_gets_signs_of_life_and_then_its_answer(
    running: Any, decode: FakeNode
) -> None:
    occupy(decode)
    async with running(decode, max_inflight=1, keepalive_s=0.05) as client:
        first = await ask(client, "first")
        asked = body("second", stream=True)
        async with client.session.post(client.url + COMPLETIONS, json=asked) as response:
            line = await response.content.readline()
            assert line == b": waiting\n"
            placement = response.headers["x-baton-placement"]
            assert "reason=waiting: every node is full; 0 requests wait ahead of this one" in placement
            decode.script.run = "answer"
            await finish_one(first)
            rest = await response.text()
    assert rest.endswith("data: [DONE]\n\n")


async def test_a_full_queue_answers_429_and_when_to_come_back(
    running: Any, decode: FakeNode
) -> None:
    occupy(decode)
    async with running(decode, max_inflight=1, max_queued=1) as client:
        tasks = [await ask(client, "first"), await ask(client, "second")]
        status, reply, headers = await client.post(COMPLETIONS, body("third"))
        assert (status, reply["error"]["code"]) == (429, "queue_full")
        assert reply["error"]["type"] == "rate_limit_error"
        assert int(headers["retry-after"]) >= 1
        assert headers["x-baton-placement"].endswith("reason=refused: queue_full")
        assert await client.queued() == 1
        page = await client.text("/metrics")
        assert 'baton_router_rejected_total{code="queue_full"} 1.0\n' in page
        assert 'baton_router_admission_queue{priority="0"} 1.0\n' in page
        await finish(client, *tasks)


async def test_who_waits_too_long_hears_503(running: Any, decode: FakeNode) -> None:
    occupy(decode)
    async with running(decode, max_inflight=1, queue_timeout_s=0.2) as client:
        first = await ask(client, "first")
        status, reply, headers = await client.post(COMPLETIONS, body("second"))
        assert (status, reply["error"]["code"]) == (503, "queue_timeout")
        assert "every node was full for 0.2 s" in reply["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        assert await client.queued() == 0
        page = await client.text("/metrics")
        assert 'baton_router_admission_wait_seconds_count{priority="0"} 1.0\n' in page
        await finish(client, first)


async def test_a_client_that_leaves_frees_its_place(running: Any, decode: FakeNode) -> None:
    occupy(decode)
    async with running(decode, max_inflight=1, max_queued=1) as client:
        first, second = await ask(client, "first"), await ask(client, "second")
        await finish_one(second)
        await until_is(client.queued, 0)
        third = await ask(client, "third")
        assert await client.queued() == 1
        decode.script.run = "answer"
        await finish_one(first)
        assert (await third)[0] == 200
    assert prompts(decode) == ["first", "third"]


async def test_a_higher_priority_goes_first_and_tenants_of_one_take_turns(
    running: Any, decode: FakeNode, keyed: dict[str, Any]
) -> None:
    Path(keyed["tenants"]).write_text("[tenants.ops]\npriority = 10\n")
    occupy(decode)
    async with running(decode, max_inflight=1, **keyed) as client:
        first = await ask(client, "first", OPS)
        tasks = [await ask(client, f"acme{n}", ACME) for n in range(3)]
        tasks += [await ask(client, f"globe{n}", GLOBEX) for n in range(2)]
        tasks.append(await ask(client, "ops", OPS))
        decode.script.run = "answer"
        await finish_one(first)
        await asyncio.gather(*tasks)
    assert prompts(decode) == ["first", "ops", "acme0", "globe0", "acme1", "globe1", "acme2"]


@pytest.mark.parametrize("shared", [True, False], ids=["several tenants", "one tenant"])
async def test_the_largest_of_several_tenants_leaves_room_in_which_others_pass_it(
    running: Any, decode: FakeNode, keyed: dict[str, Any], shared: bool
) -> None:
    if not shared:
        Path(keyed["api_keys"]).write_text(f"acme {ACME}\n")
    occupy(decode)
    async with running(decode, max_inflight=8, **keyed) as client:
        admission = client.router.admission
        tasks = [await ask(client, f"acme{n}", ACME) for n in range(9)]
        assert await client.queued() == (2 if shared else 1)
        if shared:
            tasks += [await ask(client, f"globe{n}", GLOBEX) for n in range(2)]
            assert (prompts(decode)[7:], await client.queued()) == (["globe0"], 3)
        await finish(client, *tasks)
        assert len(admission._running) == 0


async def test_who_had_most_prompts_computed_lately_waits_though_another_one_runs_more(
    running: Any, decode: FakeNode, keyed: dict[str, Any]
) -> None:
    """The node computes 10,000 tokens a second: acme may queue 5 ms of it, globex 25."""
    async with running(decode, admission_queue_ms=100, **keyed) as client:
        for number in range(6):
            assert (await client.post(COMPLETIONS, body(f"{number}" * 90), bearer(ACME)))[0] == 200
        occupy(decode)
        tasks = [await ask(client, f"{n}" * 30, GLOBEX) for n in range(3)]
        tasks += [await ask(client, "acme", ACME), await ask(client, "globex", GLOBEX)]
        await until(lambda: prompts(decode)[-1] == "globex")
        assert await client.queued() == 1
        await finish(client, *tasks)


async def test_what_is_short_passes_prompts_of_its_tenant_that_wait_for_prefill_nodes(
    running: Any,
) -> None:
    facts: dict[str, Any] = {"speeds": Speeds(prefill_tokens_per_s=1000.0), "max_num_seqs": 256}
    async with (
        FakeNode("decode-0", "decode", **facts) as decode,
        FakeNode("prefill-0", "prefill", **facts) as prefill,
        running(decode, prefill, handoff_min_tokens=16) as client,
    ):
        nodes = client.router.view.nodes
        await decode.say_load(running=200)
        await prefill.say_load(queued_tokens=5000)
        await until(lambda: nodes["decode-0"].sequences == 200)
        await until(lambda: nodes["prefill-0"].queued_tokens == 5000)
        long = await ask(client, "x" * 32)
        assert (await client.post(COMPLETIONS, body("short")))[0] == 200
        assert (await client.queued(), prefill.got_of(PrefillJob)) == (1, [])
        await prefill.say_load()
        assert (await long)[0] == 200
        assert len(prefill.got_of(PrefillJob)) == 1


async def test_by_its_weight_a_tenant_may_have_more_before_it_is_the_largest(
    running: Any, decode: FakeNode, keyed: dict[str, Any]
) -> None:
    Path(keyed["tenants"]).write_text("[tenants.acme]\nweight = 3\n")
    occupy(decode)
    async with running(decode, max_inflight=8, **keyed) as client:
        tasks = [await ask(client, f"globe{n}", GLOBEX) for n in range(2)]
        tasks += [await ask(client, f"acme{n}", ACME) for n in range(6)]
        assert (len(prompts(decode)), await client.queued()) == (8, 0)
        await finish(client, *tasks)


async def test_in_a_full_queue_a_flood_makes_room_for_another_tenant(
    running: Any, decode: FakeNode, keyed: dict[str, Any]
) -> None:
    occupy(decode)
    async with running(decode, max_inflight=1, max_queued=2, **keyed) as client:
        tasks = [await ask(client, f"acme{n}", ACME) for n in range(3)]
        other = asyncio.create_task(client.post(COMPLETIONS, body("globex"), bearer(GLOBEX)))
        status, reply, _ = await tasks[2]
        assert (status, reply["error"]["code"]) == (429, "queue_full")
        assert "a tenant with fewer waiting requests" in reply["error"]["message"]
        assert await client.queued() == 2
        await finish(client, *tasks, other)


async def test_a_tenant_over_its_budget_hears_429_and_is_let_in_again_by_another_file(
    running: Any, decode: FakeNode, keyed: dict[str, Any]
) -> None:
    limits = Path(keyed["tenants"])
    limits.write_text("[tenants.acme]\nrequests_per_minute = 1\n")
    async with running(decode, **keyed) as client:
        first = await client.post(COMPLETIONS, body("x"), bearer(ACME))
        status, reply, headers = await client.post(COMPLETIONS, body("x"), bearer(ACME))
        other = await client.post(COMPLETIONS, body("x"), bearer(GLOBEX))
        assert (first[0], other[0]) == (200, 200)
        assert (status, reply["error"]["code"]) == (429, "rate_limited")
        assert 1 <= int(headers["retry-after"]) <= 60
        limits.write_text("# nothing\n")

        async def let_in() -> bool:
            return bool((await client.post(COMPLETIONS, body("x"), bearer(ACME)))[0] == 200)

        await until_is(let_in, True)
    assert len(decode.got_of(RunJob)) == 3


async def test_limits_of_a_tenant_without_a_key_are_warned_of(
    running: Any, decode: FakeNode, keyed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    Path(keyed["tenants"]).write_text("[tenants.acme]\n[tenants.glubex]\n")
    async with running(decode, **keyed):
        pass
    assert "names 'glubex', which has no API key" in caplog.text
    assert "'acme'" not in caplog.text


async def test_tokens_that_were_used_are_what_a_budget_pays_for_and_metrics_count(
    running: Any, decode: FakeNode, keyed: dict[str, Any]
) -> None:
    """4 + 13 tokens each, of 4 + 90 that it might have used; the budget is 120 at once."""
    text = "[tenants.acme]\ntokens_per_minute = 2\nburst_seconds = 3600\n"
    Path(keyed["tenants"]).write_text(text)
    async with running(decode, **keyed) as client:
        reply = [
            await client.post(COMPLETIONS, body("xxxx", max_tokens=90), bearer(ACME))
            for _ in range(3)
        ]
        page = await client.text("/metrics", bearer(OPS))
    assert [status for status, _, _ in reply] == [200, 200, 429]
    assert 'baton_router_tenant_tokens_total{kind="prompt",tenant="acme"} 8.0\n' in page
    assert 'baton_router_tenant_tokens_total{kind="completion",tenant="acme"} 26.0\n' in page


async def test_what_never_had_a_place_costs_no_tokens(
    running: Any, decode: FakeNode, keyed: dict[str, Any]
) -> None:
    text = "[defaults]\ntokens_per_minute = 1\nburst_seconds = 3600\n"  # 60 at once
    Path(keyed["tenants"]).write_text(text)
    occupy(decode)
    settings = {"max_inflight": 1, "queue_timeout_s": 0.2} | keyed
    async with running(decode, **settings) as client:
        first = await ask(client, "first", OPS)
        for _ in range(3):
            refused = await client.post(COMPLETIONS, body("x", max_tokens=50), bearer(ACME))
            assert refused[1]["error"]["code"] == "queue_timeout"
        await finish(client, first)


async def test_a_request_whose_node_is_lost_does_not_wait_here_again(
    running: Any, decode: FakeNode, other: FakeNode
) -> None:
    """Both nodes are full, and somebody waits; it goes on at once where it can."""
    occupy(decode)
    occupy(other)
    settings = {"max_inflight": 1, "link_patience_s": 0.1}
    async with running(decode, other, **settings) as client:
        tasks = [await ask(client, name) for name in ("first", "second", "third")]
        assert await client.queued() == 1
        [lost] = prompts(decode)
        await decode.stop()
        await until(lambda: len(other.got_of(RunJob)) == 2)
        assert prompts(other)[1] == lost
        assert await client.queued() == 1
        await finish(client, *tasks)


async def test_at_its_end_a_router_tells_who_waits_to_come_again(
    running: Any, decode: FakeNode
) -> None:
    occupy(decode)
    async with running(decode, max_inflight=1) as client:
        tasks = [await ask(client, "first"), await ask(client, "second")]
        client.router.admission.end()
        status, reply, headers = await tasks[1]
        assert (status, reply["error"]["code"]) == (503, "unavailable")
        assert "shutting down" in reply["error"]["message"]
        assert "retry-after" in headers
        await finish(client, tasks[0])


async def test_a_waiting_stream_whose_connection_breaks_leaves_the_queue(
    running: Any, decode: FakeNode
) -> None:
    occupy(decode)
    async with running(decode, max_inflight=1, keepalive_s=0.05) as client:
        first = await ask(client, "first")
        async with aiohttp.ClientSession() as session:
            asked = body("second", stream=True)
            async with session.post(client.url + COMPLETIONS, json=asked) as response:
                await response.content.readline()
                assert await client.queued() == 1
                response.close()
        await until_is(client.queued, 0)
        await finish(client, first)
