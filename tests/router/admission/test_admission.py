"""Admission over HTTP: which calls wait while every node is full, in which order, and the answers
of calls that are refused."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton_protocol.ids import NodeId
from baton_protocol.link import PrefillJob, RunJob
from baton_protocol.store import Speeds
from baton_router.admission.capacity import AdmittedLoad
from baton_text.tokenizer import LONG_TEXT, Tokenizer
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import WAIT_S, until, until_is

pytestmark = pytest.mark.integration

ACME, GLOBEX, OPS = "sk-acme", "sk-globex", "sk-ops"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def tenant_settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of a router with API keys and a limits file that tests fill."""
    (tmp_path / "keys").write_text(f"acme {ACME}\nglobex {GLOBEX}\nops {OPS} admin\n")
    (tmp_path / "limits").write_text("")
    return {"api_keys": str(tmp_path / "keys"), "tenants": str(tmp_path / "limits")}


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 2} | fields


def prompts(node: FakeNode) -> list[str]:
    return [bytes(job.request.prompt_ids).decode() for job in node.got_of(RunJob)]


async def submit(
    client: pools.Client, prompt: str, key: str = "", **fields: Any
) -> asyncio.Task[pools.Reply]:
    """Send a call, and wait until the router has placed or queued it."""

    async def accepted() -> int:
        return int(await client.queued() + await client.unfinished())

    before = await accepted()
    headers = pools.bearer(key) if key else None
    task = asyncio.create_task(client.post(COMPLETIONS, body(prompt, **fields), headers))
    async with asyncio.timeout(WAIT_S):
        while not task.done() and await accepted() <= before:
            await asyncio.sleep(0.01)
    return task


def occupy(node: FakeNode) -> None:
    """Let the node keep all later jobs without an answer."""
    node.script.run = "silent"


async def cancel_all(client: pools.Client, *tasks: asyncio.Task[pools.Reply]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until_is(client.unfinished, 0)


async def test_a_pool_with_room_admits_every_call_at_once(decode: FakeNode) -> None:
    occupy(decode)
    async with pools.running(decode) as client:
        calls = [client.post(COMPLETIONS, body(f"p{n}")) for n in range(50)]
        tasks = [asyncio.create_task(call) for call in calls]
        await until(lambda: len(decode.got_of(RunJob)) == 50)
        assert await client.queued() == 0
        await cancel_all(client, *tasks)


async def test_while_every_node_is_full_calls_wait_and_start_in_order_of_arrival(
    decode: FakeNode,
) -> None:
    occupy(decode)
    async with pools.running(decode, max_inflight=1) as client:
        first = await submit(client, "first")
        tasks = [await submit(client, f"p{n}") for n in range(3)]
        assert await client.queued() == 3
        assert await client.held() == 3
        assert prompts(decode) == ["first"]
        decode.script.run = "answer"
        await cancel(first)
        replies = await asyncio.gather(*tasks)
    assert [status for status, _, _ in replies] == [200] * 3
    assert prompts(decode) == ["first", "p0", "p1", "p2"]


async def cancel(task: asyncio.Task[pools.Reply]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_burst_never_runs_more_sequences_than_the_nodes_take(
    decode: FakeNode, other: FakeNode
) -> None:
    """The router queries the index between a turn and its booking. Calls that arrive meanwhile must
    not be admitted on top."""
    decode.script.token_s = other.script.token_s = 0.002
    async with pools.running(decode, other, max_inflight=2) as client:
        nodes = client.router.view.nodes.values()
        burst = asyncio.gather(*(client.post(COMPLETIONS, body(f"p{n}")) for n in range(40)))
        most = 0
        while not burst.done():
            most = max(most, sum(node.sequences for node in nodes))
            await asyncio.sleep(0)
        assert [status for status, _, _ in burst.result()] == [200] * 40
        assert most == 4
        assert client.router.admission._pending == AdmittedLoad()


async def test_a_long_text_does_not_delay_the_tokenization_of_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, encode = threading.Event(), Tokenizer.encode_up_to

    def delayed(self: Tokenizer, text: str, *rest: Any) -> tuple[list[int], bool]:
        if len(text) > LONG_TEXT:
            assert gate.wait(120)
        return encode(self, text, *rest)

    monkeypatch.setattr(Tokenizer, "encode_up_to", delayed)
    node = FakeNode("decode-0", "decode", max_model_len=2 * LONG_TEXT)
    async with node, pools.running(node) as client:
        long = asyncio.create_task(client.post(COMPLETIONS, body("x" * (LONG_TEXT + 1))))
        try:
            await until_is(client.answering, 1)
            assert (await client.post(COMPLETIONS, body("short")))[0] == 200
            assert not long.done()
        finally:
            gate.set()
        assert (await long)[0] == 200


async def test_a_node_is_full_at_the_max_num_seqs_that_it_reports() -> None:
    async with FakeNode("decode-0", "decode", max_num_seqs=2) as node:
        occupy(node)
        async with pools.running(node) as client:
            tasks = [await submit(client, f"p{n}") for n in range(3)]
            assert prompts(node) == ["p0", "p1"]
            assert await client.queued() == 1
            await cancel_all(client, *tasks)


async def test_a_node_is_full_when_its_queued_prompts_take_admission_queue_ms(
    decode: FakeNode,
) -> None:
    """The node computes 10,000 tokens a second: the first prompt takes 10 ms."""
    occupy(decode)
    async with pools.running(decode, admission_queue_ms=10) as client:
        tasks = [await submit(client, "x" * 100), await submit(client, "second")]
        assert (len(prompts(decode)), await client.queued()) == (1, 1)
        await cancel_all(client, *tasks)


async def test_a_waiting_stream_gets_keep_alives_and_then_its_answer(decode: FakeNode) -> None:
    occupy(decode)
    async with pools.running(decode, max_inflight=1, keepalive_s=0.05) as client:
        first = await submit(client, "first")
        second = body("second", stream=True)
        async with client.session.post(client.url + COMPLETIONS, json=second) as response:
            line = await response.content.readline()
            assert line == b": waiting\n"
            placement = response.headers["x-baton-placement"]
            assert (
                "reason=waiting: every node is full; 0 requests wait ahead of this one" in placement
            )
            decode.script.run = "answer"
            await cancel(first)
            rest = await response.text()
    assert rest.endswith("data: [DONE]\n\n")


async def test_a_full_queue_answers_429_with_retry_after(decode: FakeNode) -> None:
    occupy(decode)
    async with pools.running(decode, max_inflight=1, max_queued=1) as client:
        tasks = [await submit(client, "first"), await submit(client, "second")]
        status, reply, headers = await client.post(COMPLETIONS, body("third"))
        assert (status, reply["error"]["code"]) == (429, "queue_full")
        assert reply["error"]["type"] == "rate_limit_error"
        assert int(headers["retry-after"]) >= 1
        assert headers["x-baton-placement"].endswith("reason=refused: queue_full")
        assert await client.queued() == 1
        page = await client.text("/metrics")
        assert 'baton_router_rejected_total{code="queue_full"} 1.0\n' in page
        assert 'baton_router_admission_queue{priority="0"} 1.0\n' in page
        await cancel_all(client, *tasks)


async def test_a_call_that_waits_too_long_gets_503(decode: FakeNode) -> None:
    occupy(decode)
    async with pools.running(decode, max_inflight=1, queue_timeout_s=0.2) as client:
        first = await submit(client, "first")
        status, reply, headers = await client.post(COMPLETIONS, body("second"))
        assert (status, reply["error"]["code"]) == (503, "queue_timeout")
        assert "every node was full for 0.2 s" in reply["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        assert await client.queued() == 0
        page = await client.text("/metrics")
        assert 'baton_router_admission_wait_seconds_count{priority="0"} 1.0\n' in page
        await cancel_all(client, first)


async def test_a_disconnect_frees_the_call_s_place_in_the_queue(decode: FakeNode) -> None:
    occupy(decode)
    async with pools.running(decode, max_inflight=1, max_queued=1) as client:
        first, second = await submit(client, "first"), await submit(client, "second")
        await cancel(second)
        await until_is(client.queued, 0)
        third = await submit(client, "third")
        assert await client.queued() == 1
        decode.script.run = "answer"
        await cancel(first)
        assert (await third)[0] == 200
    assert prompts(decode) == ["first", "third"]


async def test_higher_priorities_go_first_and_tenants_of_one_priority_take_turns(
    decode: FakeNode, tenant_settings: dict[str, Any]
) -> None:
    Path(tenant_settings["tenants"]).write_text("[tenants.ops]\npriority = 10\n")
    occupy(decode)
    async with pools.running(decode, max_inflight=1, **tenant_settings) as client:
        first = await submit(client, "first", OPS)
        tasks = [await submit(client, f"acme{n}", ACME) for n in range(3)]
        tasks += [await submit(client, f"globe{n}", GLOBEX) for n in range(2)]
        tasks.append(await submit(client, "ops", OPS))
        decode.script.run = "answer"
        await cancel(first)
        await asyncio.gather(*tasks)
    assert prompts(decode) == ["first", "ops", "acme0", "globe0", "acme1", "globe1", "acme2"]


@pytest.mark.parametrize("shared", [True, False], ids=["several tenants", "one tenant"])
async def test_the_largest_of_several_tenants_leaves_sequences_free_for_the_others(
    decode: FakeNode, tenant_settings: dict[str, Any], shared: bool
) -> None:
    if not shared:
        Path(tenant_settings["api_keys"]).write_text(f"acme {ACME}\n")
    occupy(decode)
    async with pools.running(decode, max_inflight=8, **tenant_settings) as client:
        admission = client.router.admission
        tasks = [await submit(client, f"acme{n}", ACME) for n in range(9)]
        assert await client.queued() == (2 if shared else 1)
        if shared:
            tasks += [await submit(client, f"globe{n}", GLOBEX) for n in range(2)]
            assert (prompts(decode)[7:], await client.queued()) == (["globe0"], 3)
        await cancel_all(client, *tasks)
        assert len(admission._running) == 0


async def test_the_tenant_with_the_most_recent_prompts_waits_even_if_another_runs_more(
    decode: FakeNode, tenant_settings: dict[str, Any]
) -> None:
    """The node computes 10,000 tokens a second: acme may use 5 ms of its queue, globex 25 ms."""
    async with pools.running(decode, admission_queue_ms=100, **tenant_settings) as client:
        for number in range(6):
            assert (await client.post(COMPLETIONS, body(f"{number}" * 90), pools.bearer(ACME)))[
                0
            ] == 200
        occupy(decode)
        tasks = [await submit(client, f"{n}" * 30, GLOBEX) for n in range(3)]
        tasks += [await submit(client, "acme", ACME), await submit(client, "globex", GLOBEX)]
        await until(lambda: prompts(decode)[-1] == "globex")
        assert await client.queued() == 1
        await cancel_all(client, *tasks)


async def test_a_short_prompt_passes_its_tenant_s_prompts_that_wait_for_prefill_nodes() -> None:
    facts: dict[str, Any] = {"speeds": Speeds(prefill_tokens_per_s=1000.0), "max_num_seqs": 256}
    async with (
        FakeNode("decode-0", "decode", **facts) as decode,
        FakeNode("prefill-0", "prefill", **facts) as prefill,
        pools.running(decode, prefill, handoff_min_tokens=16) as client,
    ):
        nodes = client.router.view.nodes
        await decode.say_load(running=200)
        await prefill.say_load(queued_tokens=5000)
        await until(lambda: nodes[NodeId("decode-0")].sequences == 200)
        await until(lambda: nodes[NodeId("prefill-0")].queued_tokens == 5000)
        long = await submit(client, "x" * 32)
        assert (await client.post(COMPLETIONS, body("short")))[0] == 200
        assert (await client.queued(), prefill.got_of(PrefillJob)) == (1, [])
        await prefill.say_load()
        assert (await long)[0] == 200
        assert len(prefill.got_of(PrefillJob)) == 1


async def test_a_tenant_with_a_higher_weight_may_run_more_before_it_exceeds_its_share(
    decode: FakeNode, tenant_settings: dict[str, Any]
) -> None:
    Path(tenant_settings["tenants"]).write_text("[tenants.acme]\nweight = 3\n")
    occupy(decode)
    async with pools.running(decode, max_inflight=8, **tenant_settings) as client:
        tasks = [await submit(client, f"globe{n}", GLOBEX) for n in range(2)]
        tasks += [await submit(client, f"acme{n}", ACME) for n in range(6)]
        assert (len(prompts(decode)), await client.queued()) == (8, 0)
        await cancel_all(client, *tasks)


async def test_in_a_full_queue_a_new_tenant_replaces_the_largest_tenant_s_last_call(
    decode: FakeNode, tenant_settings: dict[str, Any]
) -> None:
    occupy(decode)
    async with pools.running(decode, max_inflight=1, max_queued=2, **tenant_settings) as client:
        tasks = [await submit(client, f"acme{n}", ACME) for n in range(3)]
        other = asyncio.create_task(client.post(COMPLETIONS, body("globex"), pools.bearer(GLOBEX)))
        status, reply, _ = await tasks[2]
        assert (status, reply["error"]["code"]) == (429, "queue_full")
        assert "a tenant with fewer waiting requests" in reply["error"]["message"]
        assert await client.queued() == 2
        await cancel_all(client, *tasks, other)


async def test_a_tenant_over_budget_gets_429_until_the_limits_file_changes(
    decode: FakeNode, tenant_settings: dict[str, Any]
) -> None:
    limits = Path(tenant_settings["tenants"])
    limits.write_text("[tenants.acme]\nrequests_per_minute = 1\n")
    async with pools.running(decode, **tenant_settings) as client:
        first = await client.post(COMPLETIONS, body("x"), pools.bearer(ACME))
        status, reply, headers = await client.post(COMPLETIONS, body("x"), pools.bearer(ACME))
        other = await client.post(COMPLETIONS, body("x"), pools.bearer(GLOBEX))
        assert (first[0], other[0]) == (200, 200)
        assert (status, reply["error"]["code"]) == (429, "rate_limited")
        assert 1 <= int(headers["retry-after"]) <= 60
        limits.write_text("# nothing\n")

        async def admitted() -> bool:
            return bool((await client.post(COMPLETIONS, body("x"), pools.bearer(ACME)))[0] == 200)

        await until_is(admitted, True)
    assert len(decode.got_of(RunJob)) == 3


async def test_limits_of_a_tenant_without_a_key_log_a_warning(
    decode: FakeNode,
    tenant_settings: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path(tenant_settings["tenants"]).write_text("[tenants.acme]\n[tenants.glubex]\n")
    async with pools.running(decode, **tenant_settings):
        pass
    assert "names 'glubex', which has no API key" in caplog.text
    assert "'acme'" not in caplog.text


async def test_budgets_and_metrics_count_only_used_tokens(
    decode: FakeNode, tenant_settings: dict[str, Any]
) -> None:
    """Each call uses 4 + 13 of the 4 + 90 tokens it could use; the budget allows 120 at once."""
    text = "[tenants.acme]\ntokens_per_minute = 2\nburst_seconds = 3600\n"
    Path(tenant_settings["tenants"]).write_text(text)
    async with pools.running(decode, **tenant_settings) as client:
        replies = [
            await client.post(COMPLETIONS, body("xxxx", max_tokens=90), pools.bearer(ACME))
            for _ in range(3)
        ]
        page = await client.text("/metrics", pools.bearer(OPS))
    assert [status for status, _, _ in replies] == [200, 200, 429]
    assert 'baton_router_tenant_tokens_total{kind="prompt",tenant="acme"} 8.0\n' in page
    assert 'baton_router_tenant_tokens_total{kind="completion",tenant="acme"} 26.0\n' in page


async def test_a_call_that_never_started_costs_no_tokens(
    decode: FakeNode, tenant_settings: dict[str, Any]
) -> None:
    text = "[defaults]\ntokens_per_minute = 1\nburst_seconds = 3600\n"  # 60 at once
    Path(tenant_settings["tenants"]).write_text(text)
    occupy(decode)
    settings = {"max_inflight": 1, "queue_timeout_s": 0.2} | tenant_settings
    async with pools.running(decode, **settings) as client:
        first = await submit(client, "first", OPS)
        for _ in range(3):
            refused = await client.post(COMPLETIONS, body("x", max_tokens=50), pools.bearer(ACME))
            assert refused[1]["error"]["code"] == "queue_timeout"
        await cancel_all(client, first)


async def test_a_request_whose_node_is_lost_does_not_wait_for_admission_again(
    decode: FakeNode, other: FakeNode
) -> None:
    """Both nodes are full and a call waits. The lost node's request is placed again at once."""
    occupy(decode)
    occupy(other)
    settings = {"max_inflight": 1, "link_patience_s": 0.1}
    async with pools.running(decode, other, **settings) as client:
        tasks = [await submit(client, name) for name in ("first", "second", "third")]
        assert await client.queued() == 1
        [lost] = prompts(decode)
        await decode.stop()
        await until(lambda: len(other.got_of(RunJob)) == 2)
        assert prompts(other)[1] == lost
        assert await client.queued() == 1
        await cancel_all(client, *tasks)


async def test_at_shutdown_waiting_calls_fail_with_503(decode: FakeNode) -> None:
    occupy(decode)
    async with pools.running(decode, max_inflight=1) as client:
        tasks = [await submit(client, "first"), await submit(client, "second")]
        client.router.admission.refuse_waiting()
        status, reply, headers = await tasks[1]
        assert (status, reply["error"]["code"]) == (503, "unavailable")
        assert "shutting down" in reply["error"]["message"]
        assert "retry-after" in headers
        await cancel_all(client, tasks[0])


async def test_a_waiting_stream_whose_connection_breaks_leaves_the_queue(decode: FakeNode) -> None:
    occupy(decode)
    async with pools.running(decode, max_inflight=1, keepalive_s=0.05) as client:
        first = await submit(client, "first")
        async with aiohttp.ClientSession() as session:
            second = body("second", stream=True)
            async with session.post(client.url + COMPLETIONS, json=second) as response:
                await response.content.readline()
                assert await client.queued() == 1
                response.close()
        await until_is(client.queued, 0)
        await cancel_all(client, first)
