"""/v1/batches on a router with fake nodes: outcomes of lines and of batches, order, limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from baton_protocol.link import RunJob
from baton_router.http.batch_lines import MOST_WAITING
from baton_router.requests.tokenize import BACKGROUND_RANK
from tests.router import pools
from tests.router.batches.batch_clients import Json, api_of, ended, line, lines_of, send
from tests.router.pools import COMPLETIONS, REPLY
from tests.support.nodes.fake_node import FakeNode
from tests.support.stores.s3_server import BUCKET, s3_server, use_server
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration


async def test_each_line_has_the_answer_or_the_error_that_it_would_get_alone(
    decode: FakeNode, tmp_path: Path
) -> None:
    wrong: list[Json] = [{"max_tokens": -4}, {"stream": True}, {"model": "other"}, {"color": 1}]
    lines = [line(number) for number in range(60)]
    lines += [line(100 + number, body=body) for number, body in enumerate(wrong)]
    async with pools.running(decode, file_store=str(tmp_path)) as client, api_of(client.url) as api:
        queued = await send(api, lines)
        assert queued.status == "validating"
        batch = await ended(api, queued)
        assert batch.status == "completed"
        assert batch.in_progress_at
        assert batch.finalizing_at
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 64, "completed": 60, "failed": 4}
        output = await lines_of(api, batch.output_file_id)
        errors = await lines_of(api, batch.error_file_id)
        assert set(output) == {each["custom_id"] for each in lines[:60]}
        for answer in output.values():
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["body"]["choices"][0]["text"] == REPLY
        assert [errors[f"line {100 + i}"]["response"]["status_code"] for i in range(4)] == [
            *(400, 400, 404, 400),
        ]
        for number, body in enumerate(wrong):
            if "stream" not in body:
                status, alone, _ = await client.post(COMPLETIONS, lines[60 + number]["body"])
                assert errors[f"line {100 + number}"]["response"]["body"] == alone, status
        shown = await pools.explanation_of(client, output["line 7"]["response"]["request_id"])
        assert (shown["status"], shown["endpoint"]) == (200, "completions")
        listed = await api.batches.list()
        assert listed.data == [batch]
        assert (await api.files.retrieve(str(batch.output_file_id))).purpose == "batch_output"
        assert await client.figure('baton_router_batch_lines_total{outcome="completed"}') == 60
        assert await client.figure('baton_router_batches_total{status="completed"}') == 1
    assert list((tmp_path / "parts").rglob("*-*")) == []
    assert list((tmp_path / "queue").rglob("*")) == []


def _errors(code: str, *lines: int) -> list[tuple[str, int | None]]:
    return [(code, number) for number in lines]


FAILURES: list[tuple[list[Json | str], list[tuple[str, int | None]]]] = [
    ([], [("empty_file", None)]),
    (["", "  "], [("empty_file", None)]),
    ([line(1), "", line(1)], [("duplicate_custom_id", 3)]),
    (["{", line(1), "[]", "\u20ac"], _errors("invalid_line", 1, 3, 4)),
    ([line(n, custom_id=id) for n, id in ((1, 7), (2, None))], _errors("invalid_line", 1, 2)),
    ([line(1, custom_id=""), line(2, custom_id="x" * 513)], _errors("invalid_custom_id", 1, 2)),
    ([line(1, method="GET")], [("invalid_method", 1)]),
    ([line(1, url="/v1/chat"), line(2, url="/metrics")], _errors("mismatched_url", 1, 2)),
    ([line(1) | {"body": [1]}], [("invalid_body", 1)]),
    ([line(1, custom_id="\ud800")], [("invalid_line", 1)]),
    (["[" * 3000], [("invalid_line", 1)]),
    ([line(1, body={"prompt": "x" * 5000})], [("line_too_long", 1)]),
    ([line(n) for n in range(11)], [("too_many_lines", None)]),
]


async def test_an_input_that_is_wrong_fails_the_batch_and_names_the_lines(
    decode: FakeNode, tmp_path: Path
) -> None:
    settings: Json = {"max_body_bytes": 4000, "max_batch_lines": 10}
    async with (
        pools.running(decode, file_store=str(tmp_path), **settings) as client,
        api_of(client.url) as api,
    ):
        queued = [await send(api, lines) for lines, _ in FAILURES]
        for batch, (_, expected) in zip(queued, FAILURES, strict=True):
            done = await ended(api, batch)
            assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
            assert done.errors is not None
            assert [(e.code, e.line) for e in done.errors.data or []] == expected
        assert decode.got_of(RunJob) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"endpoint": "/v1/models"}, "endpoint is .*; use one of /v1/chat/completions"),
        ({"completion_window": "1 day"}, "completion_window is .*; use a number and"),
        ({"completion_window": "31d"}, "use up to 30 days"),
        ({"input_file_id": "../../etc/passwd"}, "does not exist"),
        ({"input_file_id": "file-" + "0" * 24}, "does not exist"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata has 17 pairs; at most 16"),
        ({"metadata": {"a": 1}}, "metadata.a is 1"),
        ({"color": "red"}, "'color' is not a field of /v1/batches"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "seconds is 5"),
    ],
)
async def test_a_wrong_order_is_refused(
    decode: FakeNode, tmp_path: Path, change: Json, complaint: str
) -> None:
    async with pools.running(decode, file_store=str(tmp_path)) as client, api_of(client.url) as api:
        file = await api.files.create(file=("x", b"{}"), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        with pytest.raises(openai.APIStatusError, match=complaint) as raised:
            await api.post("/batches", body=body | change, cast_to=object)
        assert raised.value.status_code in (400, 404)
        for id in ("x", "batch_", "batch_" + "0" * 24, "..%2F..%2Fetc"):
            with pytest.raises(openai.NotFoundError):
                await api.get(f"/batches/{id}", cast_to=object)


async def test_a_cancelled_batch_ends_what_runs_and_names_the_lines_that_did_not(
    tmp_path: Path,
) -> None:
    async with (
        FakeNode("decode-0", "decode", max_num_seqs=8) as node,
        pools.running(node, file_store=str(tmp_path)) as client,
        api_of(client.url) as api,
    ):
        node.script.run = "silent"
        queued = await send(api, [line(number) for number in range(30)])
        await until(lambda: len(node.got_of(RunJob)) == 7)  # one of eight sequences is left free
        cancelled = await api.batches.cancel(queued.id)
        assert cancelled.status == "cancelling"
        assert cancelled.request_counts is not None
        assert cancelled.request_counts.total == 30
        batch = await ended(api, queued)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)
        errors = await lines_of(api, batch.error_file_id)
        assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
        assert len(errors) == 30
        assert await client.unfinished() == 0
        assert (await api.batches.cancel(queued.id)).status == "cancelled"
        node.script.run = "answer"
        completed = await ended(api, await send(api, [line(1)]))
        with pytest.raises(openai.BadRequestError, match="the batch is completed"):
            await api.batches.cancel(completed.id)


async def test_what_has_not_run_in_the_window_expires(tmp_path: Path) -> None:
    async with (
        FakeNode("decode-0", "decode", max_num_seqs=2) as node,
        pools.running(node, file_store=str(tmp_path)) as client,
        api_of(client.url) as api,
    ):
        node.script.token_s = 0.05
        batch = await ended(api, await send(api, [line(n) for n in range(20)], "3s"))
        assert batch.status == "expired"
        output = await lines_of(api, batch.output_file_id)
        errors = await lines_of(api, batch.error_file_id)
        assert output
        assert errors
        assert len(output) + len(errors) == len(output.keys() | errors.keys()) == 20
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}


async def test_other_requests_go_before_lines_and_find_room_beside_them(tmp_path: Path) -> None:
    async with (
        FakeNode("decode-0", "decode", max_num_seqs=8) as node,
        pools.running(node, file_store=str(tmp_path)) as client,
        api_of(client.url) as api,
    ):
        node.script.run = "silent"
        queued = await send(api, [line(number) for number in range(30)])
        await until(lambda: len(node.got_of(RunJob)) == 7)
        ranks = {job.request.priority for job in node.got_of(RunJob)}
        assert ranks == {BACKGROUND_RANK}
        await until_is(client.queued, MOST_WAITING)
        assert client.router.report().held == 0  # lines are no reason for more nodes
        node.script.run = "answer"
        pools.text_of(await pools.completing(client, prompt="interactive"))
        assert len(node.got_of(RunJob)) == 8
        await api.batches.cancel(queued.id)
        await ended(api, queued)


async def test_a_tenants_budget_and_priority_hold_for_lines(
    decode: FakeNode, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[defaults]\nrequests_per_minute = 240\nburst_seconds = 1\nmax_queued = 1\n")
    settings: Json = {"file_store": str(tmp_path / "store"), "tenants": str(limits)}
    loop = asyncio.get_running_loop()
    async with pools.running(decode, **settings) as client, api_of(client.url) as api:
        since = loop.time()
        batch = await ended(api, await send(api, [line(number) for number in range(12)]))
        assert loop.time() - since > 1.5  # 4 at once, then 4 per second
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 12


async def test_a_batch_waits_for_a_pool_that_has_no_nodes_yet(
    decode: FakeNode, tmp_path: Path
) -> None:
    async with (
        pools.running(nodes=("http://127.0.0.1:1",), file_store=str(tmp_path)) as client,
        api_of(client.url) as api,
    ):
        queued = await send(api, [line(1)])
        await asyncio.sleep(1.0)
        assert (await api.batches.retrieve(queued.id)).status == "in_progress"
        await pools.join(client, decode)
        assert (await ended(api, queued)).status == "completed"


async def test_a_restarted_router_continues_and_runs_no_answered_line_again(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"file_store": str(tmp_path)}
    async with FakeNode("decode-0", "decode", max_num_seqs=4) as node:
        node.script.token_s = 0.02
        async with pools.running(node, **settings) as client, api_of(client.url) as api:
            queued = await send(api, [line(number) for number in range(24)])
            await until(lambda: len(node.got_of(RunJob)) > 8)
        async with pools.running(node, **settings) as client, api_of(client.url) as api:
            batch = await ended(api, queued)
            output = await lines_of(api, batch.output_file_id)
        assert len(output) == 24
        seeds = {(job.request.prompt_ids, job.request.params.seed) for job in node.got_of(RunJob)}
        assert len(seeds) == len({seed for _, seed in seeds}) == 24
        assert len(node.got_of(RunJob)) <= 24 + 4  # what ran when the router ended runs again


async def test_a_batch_in_a_bucket(
    decode: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path) as url:
        use_server(monkeypatch, url)
        store = f"s3://{BUCKET}/pool"
        async with pools.running(decode, file_store=store) as client, api_of(client.url) as api:
            lines = [line(number, body={"pad": 1} if number == 3 else {}) for number in range(20)]
            batch = await ended(api, await send(api, lines))
            assert batch.status == "completed"
            assert len(await lines_of(api, batch.output_file_id)) == 19
            assert list(await lines_of(api, batch.error_file_id)) == ["line 3"]
            file = await api.files.create(file=("big", bytes(9 << 20)), purpose="batch")
            assert len((await api.files.content(file.id)).content) == 9 << 20
            await api.files.delete(file.id)
