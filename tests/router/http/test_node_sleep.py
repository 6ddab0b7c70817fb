"""POST /nodes/{node}/sleep and /wake: who may, what the node receives, and what the answer says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton_protocol.node_sleep import SLEEP_SINCE
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until_is

pytestmark = pytest.mark.integration

SLEEP, WAKE = "/nodes/decode-0/sleep", "/nodes/decode-0/wake"
AWAY = ["weights", "kv_cache"]


async def test_a_node_sleeps_until_a_person_wakes_it(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        for body, query in (
            (b"", {"level": "1", "mode": "move"}),
            ({"level": 2, "mode": "wait"}, {"level": "2", "mode": "wait"}),
        ):
            status, answer, _ = await client.post(SLEEP, body)
            assert (status, answer) == (200, {"node": "decode-0", "away": AWAY})
            assert decode.sleeps[-1] == query
            await until_is(lambda: client.state("decode-0"), "asleep")
            status, answer, _ = await client.post(WAKE, {"tags": ["weights", "kv_cache"]})
            assert (status, answer) == (200, {"node": "decode-0", "away": []})
        assert decode.wakes == [AWAY, AWAY]
        assert pools.text_of(await pools.completing(client)) == pools.REPLY


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (SLEEP, {"level": 3}, 400, "level is 3"),
        (SLEEP, {"mode": "keep"}, 400, 'mode is "keep"'),
        (WAKE, {"tags": 7}, 400, "tags is 7"),
        ("/nodes/decode-9/sleep", b"", 404, "node 'decode-9' does not exist"),
        (SLEEP, b"", 503, "decode-0 refuses: requests are still here"),
        (WAKE, b"", 503, "decode-0 refuses: requests are still here"),
    ],
)
async def test_the_error_says_what_is_wrong(
    path: str, body: Any, status: int, message: str, decode: FakeNode
) -> None:
    decode.refusal = "requests are still here"
    async with pools.running(decode) as client:
        got, answer, _ = await client.post(path, body)
        assert got == status
        assert message in answer["error"]["message"]


async def test_a_node_of_an_older_version_cannot_sleep() -> None:
    async with (
        FakeNode("decode-0", "decode", protocol=SLEEP_SINCE - 1) as older,
        pools.running(older) as client,
    ):
        status, answer, _ = await client.post(SLEEP, b"")
        assert (status, older.sleeps) == (400, [])
        assert f"sleep needs {SLEEP_SINCE}" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("key", "code"), [("sk-of-acme", "admin_key_required"), ("sk-unknown", "invalid_api_key")]
)
async def test_only_an_admin_may_put_a_node_to_sleep(
    decode: FakeNode, tmp_path: Path, key: str, code: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme sk-of-acme\nops sk-of-ops admin\n")
    async with pools.running(decode, api_keys=str(keys)) as client:
        for path in (SLEEP, WAKE):
            _, reply, _ = await client.post(path, b"", pools.bearer(key))
            assert reply["error"]["code"] == code
        assert (await client.post(SLEEP, b"", pools.bearer("sk-of-ops")))[0] == 200
