"""The drain and resume routes: authorization, answers, and where a draining node's requests
continue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.errors import ErrorRecord, Forbidden
from baton_protocol.link import (
    DRAINED,
    Abort,
    DrainNode,
    JobFailed,
    ResumeNode,
    RunJob,
)
from baton_router.auth import Tenants
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

DRAIN, RESUME = "/nodes/decode-0/drain", "/nodes/decode-0/resume"
TOKEN = "t0ken-of-the-pool"


# --- the routes -----------------------------------------------------------------------------------


async def test_drain_and_resume_are_idempotent(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        for _ in range(2):
            status, reply, _ = await client.post(DRAIN, {"deadline_s": 60, "reason": "scale-down"})
            assert (status, reply) == (
                200,
                {"node": "decode-0", "state": "draining", "requests": 0},
            )
        [node] = (await client.get("/pool"))[1]["nodes"]
        assert (node["state"], node["reason"]) == ("draining", "scale-down")
        for _ in range(2):
            status, reply, _ = await client.post(RESUME, b"")
            assert (status, reply) == (200, {"node": "decode-0", "state": "ready", "requests": 0})
        frames = [DrainNode(60.0, "scale-down")] * 2 + [ResumeNode()] * 2
        await until(lambda: decode.got == frames)
        assert pools.text_of(await pools.completing(client)) == pools.REPLY


async def test_a_drain_without_a_body_uses_the_node_s_own_deadline(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        assert (await client.post(DRAIN, b""))[0] == 200
        assert decode.got == [DrainNode(None, "")]


async def test_pool_shows_the_replacing_revision_until_the_node_resumes(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.running(decode, other) as client:
        assert (await client.post(DRAIN, {"replaced_by": "web-7f9-c4d"}))[0] == 200
        node, _ = (await client.get("/pool"))[1]["nodes"]
        assert (node["state"], node["replaced_by"]) == ("draining", "web-7f9-c4d")
        assert decode.got == [DrainNode(None, "", "web-7f9-c4d")]
        assert (await client.post(RESUME, b""))[0] == 200
        node, _ = (await client.get("/pool"))[1]["nodes"]
        assert (node["state"], node["replaced_by"]) == ("ready", "")


async def test_the_last_node_of_its_role_is_drained_once_its_replacement_can_serve(
    decode: FakeNode,
    other: FakeNode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "baton_router.http.drain")
    drain = {"replaced_by": "r2"}
    async with pools.running(decode) as client:
        answer = asyncio.create_task(client.post(DRAIN, drain))
        await until(lambda: "telling decode-0" in caplog.text)
        assert (decode.got, pools.is_ready(client, decode)) == ([], True)
        await pools.join(client, other)
        assert (await answer)[0] == 200
        assert decode.got == [DrainNode(None, "", "r2")]
        assert (await client.post("/nodes/decode-1/drain", {"reason": "by hand"}))[0] == 200


async def test_the_last_node_of_its_role_is_not_drained_without_a_replacement_in_time(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.running(decode, other, tunables={"drain_answer_s": 0.05}) as client:
        await decode.say_load("draining")
        await client.ready(1)
        status, reply, _ = await client.post("/nodes/decode-1/drain", {"replaced_by": "r2"})
        assert (status, reply["error"]["message"]) == (
            503,
            "the router cannot serve requests without decode-1: no replacement is ready"
            " yet (1 draining, 1 ready)",
        )
        assert pools.is_ready(client, other)
        assert other.got == []


async def test_nodes_replaced_at_the_same_time_do_not_count_as_each_other_s_replacement(
    decode: FakeNode, other: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "baton_router.http.drain")
    async with FakeNode("decode-n", "decode") as new, pools.running(decode, other) as client:
        both = [
            asyncio.create_task(client.post(f"/nodes/{name}/drain", {"replaced_by": "r2"}))
            for name in ("decode-0", "decode-1")
        ]
        await until(lambda: caplog.text.count("to drain:") == 2)
        await pools.join(client, new)
        assert [status for status, _, _ in await asyncio.gather(*both)] == [200, 200]
        assert [len(node.got_of(DrainNode)) for node in (decode, other, new)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"deadline_s": -1}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"reason": 7}, "reason"),
        ({"reason": "x" * 201}, "reason"),
        ({"reason": "two\nlines"}, "reason"),
        ({"replaced_by": 7}, "replaced_by"),
        ({"replaced_by": "x" * 64}, "replaced_by"),
        ({"replaced_by": "Web"}, "replaced_by"),
        ({"replaced_by": "a b"}, "replaced_by"),
        ({"replaced_by": "a\n"}, "replaced_by"),
        (b"[]", None),
        (b"{", None),
    ],
)
async def test_an_invalid_drain_field_is_a_400_that_names_it(
    decode: FakeNode, body: Any, param: str | None
) -> None:
    async with pools.running(decode) as client:
        status, reply, _ = await client.post(DRAIN, body)
        assert (status, reply["error"]["param"]) == (400, param)
        assert decode.got == []


async def test_an_unknown_node_is_a_404_that_lists_the_known_nodes(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        for action in ("drain", "resume"):
            status, reply, _ = await client.post(f"/nodes/decode-7/{action}", b"")
            assert (status, reply["error"]["code"]) == (404, "not_found")
            assert "decode-0" in reply["error"]["message"]


async def test_a_node_that_does_not_obey_in_time_is_a_503_with_its_state(decode: FakeNode) -> None:
    async with pools.running(decode, tunables={"drain_answer_s": 0.05}) as client:
        decode.obeys = False
        status, reply, _ = await client.post(DRAIN, b"")
        assert (status, reply["error"]["message"]) == (503, "decode-0 is not draining but ready")
        decode.obeys = True
        await client.post(DRAIN, {"reason": "roll-out"})  # may also be a 503 on a slow machine
        await client.ready(0)
        decode.obeys = False
        status, reply, _ = await client.post(RESUME, b"")
        message = reply["error"]["message"]
        assert (status, message) == (503, "decode-0 is not ready but draining (roll-out)")
        await decode.stop()
        await client.ready(0)
        status, reply, _ = await client.post(DRAIN, b"")
        message = reply["error"]["message"]
        assert (status, message) == (503, "decode-0 is not draining but lost (roll-out)")


async def test_a_node_with_an_older_protocol_gets_no_drain_or_resume_frames() -> None:
    async with FakeNode("decode-0", "decode", protocol=1) as older, pools.running(older) as client:
        for path in (DRAIN, RESUME):
            status, reply, _ = await client.post(path, b"")
            assert status == 400
            assert "SIGTERM" in reply["error"]["message"]
        assert older.got == []


# --- authorization --------------------------------------------------------------------------------


async def test_a_pool_with_a_link_token_requires_it_for_a_drain(decode: FakeNode) -> None:
    decode.token = TOKEN
    async with pools.running(decode, link_token=TOKEN) as client:
        for wrong in ({}, {"Authorization": "Bearer another"}, {"Authorization": TOKEN}):
            status, reply, headers = await client.post(DRAIN, b"", wrong)
            assert (status, reply["error"]["code"]) == (401, "invalid_link_token")
            assert headers["www-authenticate"] == "Bearer"
            assert TOKEN not in reply["error"]["message"]
        assert decode.got == []
        valid = {"Authorization": f"Bearer {TOKEN}"}
        assert (await client.post(DRAIN, b"", valid))[0] == 200


@pytest.mark.parametrize(
    ("authorization", "answer"),
    [
        ("", (401, "invalid_api_key")),
        ("Bearer sk-unknown", (401, "invalid_api_key")),
        ("Bearer sk-of-acme", (403, "admin_key_required")),
        ("Bearer sk-of-ops", 200),
        (f"Bearer {TOKEN}", 200),
    ],
)
@pytest.mark.parametrize("token", ["", TOKEN])
async def test_a_router_with_api_keys_requires_an_admin_key_or_the_link_token(
    decode: FakeNode,
    tmp_path: Path,
    token: str,
    authorization: str,
    answer: Any,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme sk-of-acme\nops sk-of-ops admin\n")
    if authorization.endswith(TOKEN) and not token:
        answer = (401, "invalid_api_key")
    decode.token = token
    async with pools.running(decode, api_keys=str(keys), link_token=token) as client:
        for path in (DRAIN, RESUME):
            headers = {"Authorization": authorization} if authorization else {}
            status, reply, _ = await client.post(path, b"", headers)
            assert (status if status == 200 else (status, reply["error"]["code"])) == answer
        assert len(decode.got) == (2 if answer == 200 else 0)


@pytest.mark.parametrize(
    ("peer", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.1.2.3", False),
        ("::ffff:10.1.2.3", False),
        ("fe80::1%eth0", False),
        ("", False),
        (None, False),
    ],
)
def test_without_keys_and_token_only_clients_on_the_same_machine_may_drain(
    peer: str | None, allowed: bool
) -> None:
    tenants = Tenants({})
    if allowed:
        assert tenants.node_admin("Bearer guess", peer).admin
    else:
        with pytest.raises(Forbidden, match="--link-token"):
            tenants.node_admin("Bearer guess", peer)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
async def test_without_a_token_the_client_s_address_decides_not_the_listening_address(
    decode: FakeNode, host: str
) -> None:
    async with pools.running(decode, host=host) as client:
        assert (await client.post(DRAIN, b""))[0] == 200


# --- requests of a draining node ------------------------------------------------------------------


async def test_a_draining_node_keeps_its_requests_until_the_deadline_and_gets_no_new_ones(
    decode: FakeNode, other: FakeNode
) -> None:
    decode.script.token_s = 0.03
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await until(lambda: decode.got_of(RunJob))
        await pools.join(client, other)
        assert (await client.post(DRAIN, b""))[1]["requests"] == 1
        assert pools.text_of(await pools.completing(client)) == pools.REPLY
        assert pools.text_of(await answer) == pools.REPLY
        assert (len(decode.got_of(RunJob)), len(other.got_of(RunJob))) == (1, 1)


async def test_past_the_drain_deadline_a_stream_moves_to_another_node_without_a_strike(
    decode: FakeNode, other: FakeNode
) -> None:
    decode.script.run = "half"
    async with pools.running(decode) as client:
        answer = asyncio.create_task(pools.streamed(client))
        await pools.half_sent(client)
        await pools.join(client, other)
        await decode.say_load("draining", leaving=True)
        await until(lambda: other.got_of(RunJob))
        assert [record.strikes for record in pools.records(client)] in ([0], [])
        assert await answer == pools.REPLY
        job = pools.only_job(other, attempt=2)
        assert bytes(job.request.outputs[0]).decode() == pools.REPLY[: len(pools.REPLY) // 2]
        [reply] = decode.got_of(Abort)
        assert reply.attempt == 1
        assert await client.figure('baton_router_retries_total{cause="drained"}') == 1
        assert await client.figure("baton_router_resumed_requests_total") == 1


async def test_a_request_stays_on_its_draining_node_until_another_node_can_take_it(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.half_answered(decode) as (client, answer):
        for _ in range(3):
            await decode.say_load("draining", leaving=True)
        await client.ready(0)
        [record] = pools.records(client)
        assert (record.attempt, record.decode, record.phase) == (1, "decode-0", "running")
        assert decode.got_of(Abort) == []
        await pools.join(client, other)
        await decode.say_load("draining", leaving=True)
        assert pools.text_of(await answer) == pools.REPLY


async def test_a_request_handed_back_at_shutdown_is_placed_again_without_strike_or_refusal(
    decode: FakeNode, other: FakeNode
) -> None:
    decode.script.run = "fail"
    decode.script.failure = ErrorRecord("it has ended", DRAINED, status=503, retryable=True)
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await until(lambda: decode.got_of(RunJob))
        await decode.say_load("draining", leaving=True)
        await until(lambda: not pools.is_ready(client, decode))
        await until(lambda: [record.phase for record in pools.records(client)] == ["waiting"])
        [record] = pools.records(client)
        assert (record.strikes, record._refusals) == (0, 0)
        await pools.join(client, other)
        assert pools.text_of(await answer) == pools.REPLY
        assert decode.got_of(Abort) == []


async def test_a_drained_failure_of_another_attempt_is_ignored(decode: FakeNode) -> None:
    async with pools.half_answered(decode) as (client, answer):
        [record] = pools.records(client)
        error = ErrorRecord("it has ended", DRAINED, status=503, retryable=True)
        await decode.say(JobFailed(record.request.id, 7, error))
        decode.script.run = "answer"
        decode.cut_links()
        assert pools.text_of(await answer) == pools.REPLY
        assert record.attempt == 1
