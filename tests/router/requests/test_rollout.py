"""Roll-out to another kind of nodes: which kind gets new requests, and what running ones do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import Fingerprint
from baton_protocol.link import DRAINED, Abort, DrainNode, JobFailed, PrefillJob, RunJob
from baton_text.artifacts import byte_artifacts, digest
from tests.router import pools
from tests.support.nodes.fake_node import VOCAB, FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

NEW = Fingerprint("0" * 32)
MESSAGE = (
    "the pool rolled out to revision r2 while this request ran, and a running stream cannot"
    " move to it; send the request again"
)
ERROR = {"message": MESSAGE, "type": "server_error", "param": None, "code": "rolled_out"}


@pytest.fixture
async def new() -> AsyncIterator[FakeNode]:
    """A decode node of another kind."""
    async with FakeNode("decode-n", "decode", fingerprint=NEW, revision="r2") as node:
        yield node


async def replaced_elsewhere(client: pools.Client, node: FakeNode, *, leaving: bool = True) -> None:
    """Like `replace`, but another router sent the drain to the node."""
    node.report = msgspec.structs.replace(node.report, replaced_by="r2")
    await node.say_load("draining", leaving=leaving)
    await until(lambda: not pools.is_ready(client, node))


async def complete(client: pools.Client, count: int = 60, **more: Any) -> list[Any]:
    """Send `count` completions; check each answer's text and return the bodies."""
    answers = [await client.post("/v1/completions", pools.ask(**more)) for _ in range(count)]
    assert {pools.text_of(answer) for answer in answers} == {pools.REPLY}
    return [body for _, body, _ in answers]


def runs(*nodes: FakeNode) -> list[int]:
    return [len(node.got_of(RunJob)) for node in nodes]


# --- new requests ---------------------------------------------------------------------------------


async def test_two_kinds_share_new_requests_in_proportion_to_their_decode_nodes(
    decode: FakeNode, other: FakeNode, new: FakeNode
) -> None:
    async with pools.running(decode, other, new) as client:
        sampled = [client.router.fleet.offers.choose(None).kind.fingerprint for _ in range(600)]
        assert 140 < sampled.count(NEW) < 260  # 5 standard deviations around a third
        bodies = await complete(client, 40)
        counts = runs(decode, other, new)
        assert (sum(counts), min(counts) > 0) == (40, True)
        fingerprints = [body["system_fingerprint"] for body in bodies]
        assert fingerprints.count(NEW) == counts[2]
        nodes = (await client.get("/pool"))[1]["nodes"]
        assert [node["in_use"] for node in nodes] == [True, True, True]


async def test_a_split_request_uses_nodes_of_one_kind(
    decode: FakeNode, prefill: FakeNode, new: FakeNode
) -> None:
    new_prefill = FakeNode("prefill-n", "prefill", fingerprint=NEW)
    async with (
        new_prefill,
        pools.running(decode, prefill, new, new_prefill, handoff="always") as client,
    ):
        await complete(client, 40)
        for prefill_node, decode_node in ((prefill, decode), (new_prefill, new)):
            partners = {job.decode_node for job in prefill_node.got_of(PrefillJob)}
            assert partners == {decode_node.report.node}


async def test_a_kind_without_ready_nodes_gets_no_requests(decode: FakeNode, new: FakeNode) -> None:
    async with pools.running(decode, new) as client:
        await pools.drain_as_replaced(client, decode, leaving=False)
        await complete(client, 10)
        assert runs(decode, new) == [0, 10]


async def test_the_model_name_selects_the_kind_and_models_lists_all_names(decode: FakeNode) -> None:
    newer = FakeNode("decode-n", "decode", fingerprint=NEW, model="newer", max_model_len=128)
    async with newer, pools.running(decode, newer) as client:
        for name, expected, other in (("newer", newer, decode), ("fake-model", decode, newer)):
            before = runs(expected, other)
            bodies = await complete(client, 10, model=name)
            assert {body["model"] for body in bodies} == {name}
            assert runs(expected, other) == [before[0] + 10, before[1]]
        data = (await client.get("/v1/models"))[1]["data"]
        lengths = {model["id"]: model["max_model_len"] for model in data}
        assert lengths == {"fake-model": 256, "newer": 128}
        assert (await client.get("/v1/models/newer"))[1]["max_model_len"] == 128
        for answer in (
            await client.post("/v1/completions", pools.ask(model="older")),
            await client.get("/v1/models/older"),
        ):
            error = answer[1]["error"]
            assert (answer[0], error["code"]) == (404, "model_not_found")
            assert "'fake-model' and 'newer'" in error["message"]


async def test_served_model_names_stand_for_both_kinds(decode: FakeNode) -> None:
    newer = FakeNode("decode-n", "decode", fingerprint=NEW, model="newer")
    names = ("ours", "org/ours")
    async with newer, pools.running(decode, newer, served_model_name=names) as client:
        for name in names:
            bodies = await complete(client, 20, model=name)
            assert {body["model"] for body in bodies} == {"ours"}
        assert min(runs(decode, newer)) > 0
        models = (await client.get("/v1/models"))[1]["data"]
        assert [model["id"] for model in models] == list(names)
        for name in names:
            assert (await client.get(f"/v1/models/{name}"))[1]["id"] == name
        status, reply, _ = await client.post("/v1/completions", pools.ask(model="newer"))
        assert status == 404
        assert "serves 'ours' and 'org/ours'" in reply["error"]["message"]


# --- requests without tokens move -----------------------------------------------------------------


async def test_a_request_that_waits_for_its_first_placement_moves_to_the_new_kind(
    decode: FakeNode, new: FakeNode
) -> None:
    async with pools.running(decode) as client:
        await replaced_elsewhere(client, decode)
        answer = pools.completing(client, model="fake-model")
        await until(lambda: pools.records(client))
        await pools.join(client, new)
        reply = await answer
        assert pools.text_of(reply) == pools.REPLY
        assert reply[1]["system_fingerprint"] == NEW
        assert runs(decode, new) == [0, 1]


async def test_a_placed_request_without_tokens_moves_to_the_new_kind_with_its_seed(
    decode: FakeNode, new: FakeNode
) -> None:
    decode.script.run = "silent"
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await until(lambda: decode.got_of(RunJob))
        await pools.join(client, new)
        await pools.drain_as_replaced(client, decode)
        reply = await answer
        assert pools.text_of(reply) == pools.REPLY
        assert reply[1]["system_fingerprint"] == NEW
        before, after = pools.only_job(decode).request, pools.only_job(new, attempt=2).request
        assert (after.prompt_ids, after.params) == (before.prompt_ids, before.params)
        assert [abort.attempt for abort in decode.got_of(Abort)] == [1]
        assert await client.figure('baton_router_retries_total{cause="drained"}') == 1


async def test_a_hand_off_moves_to_the_new_kind_when_both_its_nodes_drain(
    decode: FakeNode, prefill: FakeNode, new: FakeNode
) -> None:
    prefill.script.prefill = decode.script.run = "silent"
    new_prefill = FakeNode("prefill-n", "prefill", fingerprint=NEW)
    async with new_prefill, pools.running(decode, prefill, handoff="always") as client:
        answer = pools.completing(client)
        await until(lambda: decode.got_of(RunJob) and prefill.got_of(PrefillJob))
        client.dial(new_prefill.address)
        await pools.join(client, new)
        await pools.drain_as_replaced(client, prefill, decode)
        assert pools.text_of(await answer) == pools.REPLY
        assert runs(new) == [1]


async def test_a_request_without_tokens_that_a_node_hands_back_moves_to_the_new_kind(
    decode: FakeNode, new: FakeNode
) -> None:
    decode.script.run = "fail"
    decode.script.failure = ErrorRecord("it has ended", DRAINED, status=503, retryable=True)
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await until(lambda: decode.got_of(RunJob))
        await replaced_elsewhere(client, decode)
        await pools.join(client, new)
        assert pools.text_of(await answer) == pools.REPLY


async def test_with_missing_role_fail_requests_move_to_the_new_kind_at_once(
    decode: FakeNode, new: FakeNode
) -> None:
    decode.script.run = "silent"
    async with pools.running(decode, new, missing_role="fail", unready_wait_s=0.0) as client:
        answers = [pools.completing(client) for _ in range(20)]
        await until(lambda: sum(runs(decode, new)) == 20)
        await pools.drain_as_replaced(client, decode)
        assert {pools.text_of(await answer) for answer in answers} == {pools.REPLY}


# --- requests with tokens do not move -------------------------------------------------------------


async def test_a_stream_past_the_drain_deadline_ends_with_an_error_that_names_the_revision(
    decode: FakeNode, new: FakeNode
) -> None:
    decode.script.run = "half"
    async with pools.running(decode) as client:
        body = pools.ask(stream=True)
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await pools.half_sent(client)
            await pools.join(client, new)
            await pools.drain_as_replaced(client, decode)
            events = [line for line in (await response.text()).split("\n\n") if line]
        *deltas, last = [json.loads(event.removeprefix("data: ")) for event in events]
        assert last == {"error": ERROR}
        streamed_text = "".join(delta["choices"][0]["text"] for delta in deltas)
        assert streamed_text == pools.REPLY[: len(deltas)]
        assert [abort.attempt for abort in decode.got_of(Abort)] == [1]
        assert (runs(new), await client.unfinished()) == ([0], 0)


@pytest.mark.parametrize("cause", ["leaves", "hands back", "is lost"])
async def test_a_started_call_without_streaming_ends_with_a_retryable_503(
    decode: FakeNode, new: FakeNode, cause: str
) -> None:
    async with pools.half_answered(decode) as (client, answer):
        await pools.join(client, new)
        await pools.drain_as_replaced(client, decode, leaving=cause == "leaves")
        if cause == "hands back":
            request = pools.only_job(decode).request
            decode.script.failure = ErrorRecord("it has ended", DRAINED, 503, retryable=True)
            await decode.say(JobFailed(request.id, 1, decode.script.failure))
        elif cause == "is lost":
            await decode.stop()
        status, body, headers = await answer
        assert (status, body) == (503, {"error": ERROR})
        assert headers["retry-after"] == "1"


async def test_before_the_drain_deadline_a_request_finishes_on_its_node(
    decode: FakeNode, new: FakeNode
) -> None:
    decode.script.token_s = 0.03
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await pools.half_sent(client)
        await pools.join(client, new)
        await pools.drain_as_replaced(client, decode, leaving=False)
        assert pools.text_of(await answer) == pools.REPLY
        assert runs(decode, new) == [1, 0]
        assert decode.got_of(DrainNode) == [DrainNode(0.0, "", "r2")]


async def test_a_started_request_waits_while_a_node_of_its_kind_may_come_back(
    decode: FakeNode, other: FakeNode, new: FakeNode
) -> None:
    async with pools.half_answered(decode) as (client, answer):
        await pools.join(client, other)
        await pools.join(client, new)
        await other.say_load("draining")
        await until(lambda: not pools.is_ready(client, other))
        await pools.drain_as_replaced(client, decode, leaving=False)
        await decode.stop()
        await until(lambda: [record.phase for record in pools.records(client)] == ["waiting"])
        await other.say_load("ready")
        assert pools.text_of(await answer) == pools.REPLY
        assert runs(other, new) == [1, 0]


async def test_a_waiting_request_fails_once_no_node_of_its_kind_can_come_back(
    decode: FakeNode, other: FakeNode, new: FakeNode
) -> None:
    async with pools.half_answered(decode) as (client, answer):
        await pools.join(client, other)
        await pools.join(client, new)
        await other.say_load("draining")
        await until(lambda: not pools.is_ready(client, other))
        await pools.drain_as_replaced(client, decode, leaving=False)
        await decode.stop()
        await until(lambda: [record.phase for record in pools.records(client)] == ["waiting"])
        await pools.drain_as_replaced(client, other, leaving=False)
        assert (await answer)[:2] == (503, {"error": ERROR})


async def test_a_request_waits_for_a_node_that_drains_for_another_reason(
    decode: FakeNode, new: FakeNode
) -> None:
    async with pools.half_answered(decode) as (client, answer):
        await pools.join(client, new)
        await decode.say_load("draining", leaving=True)
        await until(lambda: not pools.is_ready(client, decode))
        [record] = pools.records(client)
        assert (record.phase, record.decode) == ("running", "decode-0")
        decode.script.run = "answer"
        decode.report = msgspec.structs.replace(decode.report, state="ready")
        await decode.restart("epoch-2")
        assert pools.text_of(await answer) == pools.REPLY
        assert runs(new) == [0]


@pytest.mark.parametrize("differs", ["length", "tokenizer"])
async def test_a_request_that_does_not_fit_the_new_kind_fails_before_it_starts(
    decode: FakeNode, differs: str
) -> None:
    files = byte_artifacts(VOCAB)
    if differs == "tokenizer":
        files["tokenizer.json"] += b"\n"
    names = {name: digest(data) for name, data in files.items()}
    length = 16 if differs == "length" else 256
    report: dict[str, Any] = {"fingerprint": NEW, "artifacts": names, "max_model_len": length}
    other = FakeNode("decode-n", "decode", **report)
    other.artifacts = {digest(data): data for data in files.values()}
    async with other, pools.running(decode) as client:
        await replaced_elsewhere(client, decode)
        answer = pools.completing(client)
        await until(lambda: pools.records(client))
        await pools.join(client, other)
        assert (await answer)[:2] == (503, {"error": ERROR})
        assert runs(decode, other) == [0, 0]
