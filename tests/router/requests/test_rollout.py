"""A pool rolls out another kind of nodes: who gets new requests, and what becomes of the others."""

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
from tests.support.nodes.fake_node import VOCAB, FakeNode
from tests.support.pools.failing_pool import (
    REPLY,
    ask,
    completing,
    figure,
    half_said,
    join,
    only,
    ready,
    records,
    replace,
    text,
)
from tests.support.waiting import until

pytestmark = pytest.mark.integration

NEW = Fingerprint("0" * 32)
MESSAGE = (
    "the pool rolled out to revision r2 while this request ran, and no stream crosses over to it;"
    " send the request again"
)
ERROR = {"message": MESSAGE, "type": "server_error", "param": None, "code": "rolled_out"}


@pytest.fixture
async def new() -> AsyncIterator[FakeNode]:
    """A decode node of another kind."""
    async with FakeNode("decode-n", "decode", fingerprint=NEW, revision="r2") as node:
        yield node


async def replaced(client: Any, node: FakeNode, *, leaving: bool = True) -> None:
    """As `replace`, of one that heard it from another router, for which others could serve."""
    node.report = msgspec.structs.replace(node.report, replaced_by="r2")
    await node.say_load("draining", leaving=leaving)
    await until(lambda: not ready(client, node))


async def asked(client: Any, count: int = 60, **more: Any) -> list[Any]:
    """The bodies of so many answers, all right."""
    answers = [await client.post("/v1/completions", ask(**more)) for _ in range(count)]
    assert {text(answer) for answer in answers} == {REPLY}
    return [body for _, body, _ in answers]


def runs(*nodes: FakeNode) -> list[int]:
    return [len(node.got_of(RunJob)) for node in nodes]


# --- new requests ---------------------------------------------------------------------------------


async def test_two_kinds_share_new_requests_by_their_decode_nodes(
    running: Any, decode: FakeNode, other: FakeNode, new: FakeNode
) -> None:
    async with running(decode, other, new) as client:
        drawn = [client.router.fleet.serving(None).kind.fingerprint for _ in range(600)]
        assert 140 < drawn.count(NEW) < 260  # 5 standard deviations around a third
        bodies = await asked(client, 40)
        counts = runs(decode, other, new)
        assert (sum(counts), min(counts) > 0) == (40, True)
        named = [body["system_fingerprint"] for body in bodies]
        assert named.count(NEW) == counts[2]
        nodes = (await client.get("/pool"))[1]["nodes"]
        assert [node["in_use"] for node in nodes] == [True, True, True]


async def test_no_request_is_split_between_two_kinds(
    running: Any, decode: FakeNode, prefill: FakeNode, new: FakeNode
) -> None:
    beside = FakeNode("prefill-n", "prefill", fingerprint=NEW)
    async with beside, running(decode, prefill, new, beside, handoff="always") as client:
        await asked(client, 40)
        for computes, decodes in ((prefill, decode), (beside, new)):
            pairs = {job.decode_node for job in computes.got_of(PrefillJob)}
            assert pairs == {decodes.report.node}


async def test_a_kind_without_ready_nodes_gets_nothing_and_the_other_all(
    running: Any, decode: FakeNode, new: FakeNode
) -> None:
    async with running(decode, new) as client:
        await replace(client, decode, leaving=False)
        await asked(client, 10)
        assert runs(decode, new) == [0, 10]


async def test_a_named_model_is_that_one_and_all_names_are_told(
    running: Any, decode: FakeNode
) -> None:
    newer = FakeNode("decode-n", "decode", fingerprint=NEW, model="newer", max_model_len=128)
    async with newer, running(decode, newer) as client:
        for name, wanted, others in (("newer", newer, decode), ("fake-model", decode, newer)):
            before = runs(wanted, others)
            bodies = await asked(client, 10, model=name)
            assert {body["model"] for body in bodies} == {name}
            assert runs(wanted, others) == [before[0] + 10, before[1]]
        data = (await client.get("/v1/models"))[1]["data"]
        lengths = {one["id"]: one["max_model_len"] for one in data}
        assert lengths == {"fake-model": 256, "newer": 128}
        assert (await client.get("/v1/models/newer"))[1]["max_model_len"] == 128
        for answer in (
            await client.post("/v1/completions", ask(model="older")),
            await client.get("/v1/models/older"),
        ):
            error = answer[1]["error"]
            assert (answer[0], error["code"]) == (404, "model_not_found")
            assert "'fake-model' and 'newer'" in error["message"]


async def test_a_served_model_name_stands_for_both(running: Any, decode: FakeNode) -> None:
    newer = FakeNode("decode-n", "decode", fingerprint=NEW, model="newer")
    async with newer, running(decode, newer, served_model_name="ours") as client:
        await asked(client, 40, model="ours")
        assert min(runs(decode, newer)) > 0
        assert [one["id"] for one in (await client.get("/v1/models"))[1]["data"]] == ["ours"]
        assert (await client.post("/v1/completions", ask(model="newer")))[0] == 404


# --- requests whose client has nothing yet --------------------------------------------------------


async def test_what_waits_for_its_first_place_goes_over(
    running: Any, decode: FakeNode, new: FakeNode
) -> None:
    async with running(decode) as client:
        await replaced(client, decode)
        answer = completing(client, model="fake-model")
        await until(lambda: records(client))
        await join(client, new)
        reply = await answer
        assert text(reply) == REPLY
        assert reply[1]["system_fingerprint"] == NEW
        assert runs(decode, new) == [0, 1]


async def test_so_does_what_had_a_place_and_no_token_with_its_seed(
    running: Any, decode: FakeNode, new: FakeNode
) -> None:
    decode.script.run = "silent"
    async with running(decode) as client:
        answer = completing(client)
        await until(lambda: decode.got_of(RunJob))
        await join(client, new)
        await replace(client, decode)
        reply = await answer
        assert text(reply) == REPLY
        assert reply[1]["system_fingerprint"] == NEW
        before, after = only(decode).request, only(new, attempt=2).request
        assert (after.prompt_ids, after.params) == (before.prompt_ids, before.params)
        assert [abort.attempt for abort in decode.got_of(Abort)] == [1]
        assert await figure(client, 'baton_router_retries_total{cause="drained"}') == 1


async def test_so_does_a_hand_off_whose_both_nodes_go(
    running: Any, decode: FakeNode, prefill: FakeNode, new: FakeNode
) -> None:
    prefill.script.prefill = decode.script.run = "silent"
    beside = FakeNode("prefill-n", "prefill", fingerprint=NEW)
    async with beside, running(decode, prefill, handoff="always") as client:
        answer = completing(client)
        await until(lambda: decode.got_of(RunJob) and prefill.got_of(PrefillJob))
        client.dial(beside.address)
        await join(client, new)
        await replace(client, prefill, decode)
        assert text(await answer) == REPLY
        assert runs(new) == [1]


async def test_so_does_what_an_ended_node_hands_back(
    running: Any, decode: FakeNode, new: FakeNode
) -> None:
    decode.script.run = "fail"
    decode.script.failure = ErrorRecord("it has ended", DRAINED, status=503, retryable=True)
    async with running(decode) as client:
        answer = completing(client)
        await until(lambda: decode.got_of(RunJob))
        await replaced(client, decode)
        await join(client, new)
        assert text(await answer) == REPLY


async def test_with_missing_role_fail_it_goes_over_at_once_too(
    running: Any, decode: FakeNode, new: FakeNode
) -> None:
    decode.script.run = "silent"
    async with running(decode, new, missing_role="fail", unready_wait_s=0.0) as client:
        answers = [completing(client) for _ in range(20)]
        await until(lambda: sum(runs(decode, new)) == 20)
        await replace(client, decode)
        assert {text(await answer) for answer in answers} == {REPLY}


# --- requests that cannot go over -----------------------------------------------------------------


async def test_a_stream_past_the_deadline_ends_with_the_error_that_names_the_revision(
    running: Any, decode: FakeNode, new: FakeNode
) -> None:
    decode.script.run = "half"
    async with running(decode) as client:
        body = ask(stream=True)
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await half_said(client)
            await join(client, new)
            await replace(client, decode)
            events = [line for line in (await response.text()).split("\n\n") if line]
        said = [json.loads(event.removeprefix("data: ")) for event in events]
        assert said[-1] == {"error": ERROR}
        assert "".join(one["choices"][0]["text"] for one in said[:-1]) == REPLY[: len(said) - 1]
        assert [abort.attempt for abort in decode.got_of(Abort)] == [1]
        assert (runs(new), await client.unfinished()) == ([0], 0)


@pytest.mark.parametrize("how", ["leaves", "hands back", "is lost"])
async def test_an_answer_in_one_piece_is_a_503_that_may_be_retried(
    half_answered: Any, decode: FakeNode, new: FakeNode, how: str
) -> None:
    async with half_answered(decode) as (client, answer):
        await join(client, new)
        await replace(client, decode, leaving=how == "leaves")
        if how == "hands back":
            request = only(decode).request
            decode.script.failure = ErrorRecord("it has ended", DRAINED, 503, retryable=True)
            await decode.say(JobFailed(request.id, 1, decode.script.failure))
        elif how == "is lost":
            await decode.stop()
        status, body, headers = await answer
        assert (status, body) == (503, {"error": ERROR})
        assert headers["retry-after"] == "1"


async def test_before_the_deadline_it_ends_where_it_is(
    running: Any, decode: FakeNode, new: FakeNode
) -> None:
    decode.script.token_s = 0.03
    async with running(decode) as client:
        answer = completing(client)
        await half_said(client)
        await join(client, new)
        await replace(client, decode, leaving=False)
        assert text(await answer) == REPLY
        assert runs(decode, new) == [1, 0]
        assert decode.got_of(DrainNode) == [DrainNode(0.0, "", "r2")]


async def test_while_one_may_come_back_it_waits_for_it(
    half_answered: Any, decode: FakeNode, other: FakeNode, new: FakeNode
) -> None:
    async with half_answered(decode) as (client, answer):
        await join(client, other)
        await join(client, new)
        await other.say_load("draining")
        await until(lambda: not ready(client, other))
        await replace(client, decode, leaving=False)
        await decode.stop()
        await until(lambda: [record.phase for record in records(client)] == ["waiting"])
        await other.say_load("ready")
        assert text(await answer) == REPLY
        assert runs(other, new) == [1, 0]


async def test_once_nothing_can_come_back_it_waits_no_longer(
    half_answered: Any, decode: FakeNode, other: FakeNode, new: FakeNode
) -> None:
    async with half_answered(decode) as (client, answer):
        await join(client, other)
        await join(client, new)
        await other.say_load("draining")
        await until(lambda: not ready(client, other))
        await replace(client, decode, leaving=False)
        await decode.stop()
        await until(lambda: [record.phase for record in records(client)] == ["waiting"])
        await replace(client, other, leaving=False)
        assert (await answer)[:2] == (503, {"error": ERROR})


async def test_a_node_that_drains_for_another_reason_is_waited_for(
    half_answered: Any, decode: FakeNode, new: FakeNode
) -> None:
    async with half_answered(decode) as (client, answer):
        await join(client, new)
        await decode.say_load("draining", leaving=True)
        await until(lambda: not ready(client, decode))
        [record] = records(client)
        assert (record.phase, record.decode) == ("running", "decode-0")
        decode.script.run = "answer"
        decode.report = msgspec.structs.replace(decode.report, state="ready")
        await decode.restart("epoch-2")
        assert text(await answer) == REPLY
        assert runs(new) == [0]


@pytest.mark.parametrize("differs", ["length", "tokenizer"])
async def test_what_does_not_fit_the_new_kind_is_told_so_before_it_has_begun(
    running: Any, decode: FakeNode, differs: str
) -> None:
    files = byte_artifacts(VOCAB)
    if differs == "tokenizer":
        files["tokenizer.json"] += b"\n"
    names = {name: digest(data) for name, data in files.items()}
    length = 16 if differs == "length" else 256
    report: dict[str, Any] = {"fingerprint": NEW, "artifacts": names, "max_model_len": length}
    unlike = FakeNode("decode-n", "decode", **report)
    unlike.artifacts = {digest(data): data for data in files.values()}
    async with unlike, running(decode) as client:
        await replaced(client, decode)
        answer = completing(client)
        await until(lambda: records(client))
        await join(client, unlike)
        assert (await answer)[:2] == (503, {"error": ERROR})
        assert runs(decode, unlike) == [0, 0]
