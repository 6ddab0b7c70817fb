"""`baton run-batch`: wrong lines, each outcome of a request, and whole runs."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from baton_cli.batch import sender as sender_module
from baton_cli.batch.requests_file import BatchRequest, check_requests, read_requests
from baton_cli.batch.sender import BatchSender, Counts
from baton_cli.commands.run_batch import base_of, run
from baton_cli.commands.run_batch_options import RunBatchOptions
from baton_cli.errors import CommandError, UsageError
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.project.command import baton

pytestmark = pytest.mark.integration

Json = dict[str, Any]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(id: str, **fields: Any) -> Json:
    body: Json = {"prompt": "Say it", "max_tokens": 4, "temperature": 0}
    return {"custom_id": id, "method": "POST", "url": COMPLETIONS, "body": body} | fields


def written(folder: Path, lines: Sequence[Json | str]) -> Path:
    file = folder / "in.jsonl"
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    file.write_text("\n".join(texts))
    return file


# --- the input ------------------------------------------------------------------------------------


def test_requests_are_the_lines_that_are_not_blank(tmp_path: Path) -> None:
    lines: list[Json | str] = ["", line("a"), "  ", line("b", url=CHAT, body={"messages": []}), ""]
    file = written(tmp_path, lines)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert check_requests(file) == 2
    assert [(one.number, one.custom_id, one.path) for one in read_requests(file)] == [
        *((2, "a", COMPLETIONS), (4, "b", CHAT))
    ]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("{", "the line is no JSON object"),
        ('{"custom_id": "x"}', "the line is no JSON object with custom_id, method, url and body"),
        (line("b", method="GET"), "the method is 'GET'; use POST"),
        (line("b", url="http://a/v1/completions"), "the url is 'http://a/v1/completions'; use a"),
        (line("b", body=[1]), "the body must be a JSON object"),
        (line("b", body={"stream": True}), "stream is true"),
        (line("a"), "'a' is the custom_id of an earlier line"),
    ],
)
def test_a_wrong_line_is_named_before_any_is_sent(
    tmp_path: Path, wrong: Json | str, problem: str
) -> None:
    file = written(tmp_path, [line("a"), wrong, line("c")])
    with pytest.raises(CommandError) as caught:
        check_requests(file)
    assert str(caught.value).startswith(f"{file}, line 2: {problem}")


def test_an_input_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"in\.jsonl has no requests"):
        check_requests(written(tmp_path, ["", " "]))
    with pytest.raises(CommandError, match=r"cannot read .*: No such file or directory"):
        check_requests(tmp_path / "none")


# --- a request ------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """The URL of a server that answers so."""
    app = web.Application()
    app.add_routes([web.post(COMPLETIONS, answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def sent(url: str, requests: Sequence[BatchRequest], most: int = 2) -> tuple[list[Any], Any]:
    """The lines that are written, and the counts."""
    output, counts = io.BytesIO(), Counts()
    async with aiohttp.ClientSession() as http:
        await BatchSender(http, url, output, counts).send_all(iter(requests), most)
    return list(map(json.loads, output.getvalue().splitlines())), counts


def request(number: int = 1) -> BatchRequest:
    return BatchRequest(number, f"line {number}", COMPLETIONS, b'{"prompt": "Hi"}')


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(sender_module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(sender_module, "LONGEST_PAUSE_S", 0.02)


@pytest.mark.parametrize(
    ("status", "text", "response", "error"),
    [
        (200, '{\n  "a": [1, 2]\n}', {"status_code": 200, "body": {"a": [1, 2]}}, None),
        (400, '{"error": {}}', {"status_code": 400, "body": {"error": {}}}, None),
        (503, '{"error": {}}', {"status_code": 503, "body": {"error": {}}}, None),
        (502, "<html>", None, "invalid_answer"),
        (429, "<html>", None, "invalid_answer"),
    ],
)
@pytest.mark.usefixtures("impatient")
async def test_each_answer_is_one_line(
    status: int, text: str, response: Json | None, error: str | None
) -> None:
    async def answer(asked: web.Request) -> web.Response:
        headers = {"x-request-id": "r"}
        return web.Response(status=status, text=text, headers=headers)

    async with serving(answer) as url:
        [shown], counts = await sent(url, [request()])
    assert (shown["id"], shown["custom_id"]) == ("batch_req_1", "line 1")
    assert shown["response"] == (response and response | {"request_id": "r"})
    assert (shown["error"] and shown["error"]["code"]) == error
    assert (counts.completed, counts.failed) == ((1, 0) if status == 200 else (0, 1))


async def test_a_full_server_is_tried_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "PAUSE_S", 0.01)
    times = []

    async def answer(asked: web.Request) -> web.Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            return web.json_response({}, status=429, headers={"Retry-After": "1"})
        return web.json_response({})

    async with serving(answer) as url:
        [shown], _ = await sent(url, [request()])
    assert shown["response"]["status_code"] == 200
    first, second = times
    assert second - first >= 0.99


@pytest.mark.usefixtures("impatient")
async def test_a_server_that_is_away_is_an_error_of_the_line() -> None:
    async def answer(asked: web.Request) -> web.Response:
        raise AssertionError

    async with serving(answer) as url:
        pass
    [shown], counts = await sent(url, [request()])
    assert (shown["response"], shown["error"]["code"]) == (None, "connection_failed")
    assert counts.failed == 1


async def test_requests_in_flight_are_bounded_and_each_is_sent_once() -> None:
    running = most = 0
    seen = []

    async def answer(asked: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen.append(await asked.json())
        await asyncio.sleep(0.01)
        running -= 1
        return web.json_response({})

    async with serving(answer) as url:
        lines, counts = await sent(url, [request(number) for number in range(1, 31)], most=5)
    assert sorted(int(each["custom_id"].split()[1]) for each in lines) == list(range(1, 31))
    assert (most, len(seen), counts.completed) == (5, 30, 30)


async def test_an_answer_that_cannot_be_written_ends_the_batch() -> None:
    async def answer(asked: web.Request) -> web.Response:
        return web.json_response({})

    counts = Counts()
    async with serving(answer) as url, aiohttp.ClientSession() as http:
        with open("/dev/full", "wb", buffering=0) as full:
            sender = BatchSender(http, url, full, counts)
            with pytest.raises(CommandError, match="cannot write an answer: No space left"):
                await sender.send_all(iter([request(1), request(2)]), 2)
    assert counts == Counts()


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://a:1/", "http://a:1"),
        ("https://a/pool", "https://a/pool"),
        ("a:1", "is not a URL"),
        ("http://a/v1/", "leave it out"),
    ],
)
def test_the_url_is_the_server_s_without_the_version(url: str, base: str) -> None:
    if base.startswith("http"):
        assert base_of(url) == base
        return
    with pytest.raises(UsageError, match=base):
        base_of(url)


def test_the_input_is_not_overwritten(tmp_path: Path) -> None:
    file = written(tmp_path, [line("a")])
    with pytest.raises(UsageError, match="is the file with the requests"):
        run(RunBatchOptions(input_file=str(file), output_file=str(file)))
    with pytest.raises(UsageError, match="-i FILE"):
        run(RunBatchOptions(input_file=str(file)))
    with pytest.raises(CommandError, match=r"cannot write .*: Is a directory"):
        run(RunBatchOptions(input_file=str(file), output_file=str(tmp_path), url="http://a:1"))


async def test_a_router_answers_a_file_of_requests_to_several_routes(
    tmp_path: Path,
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    lines = [line("a"), line("b", url=CHAT, body=chat), line("c", body={"max_tokens": 0})]
    source, target = written(tmp_path, lines), tmp_path / "out.jsonl"
    async with FakeNode("decode-0", "decode") as node, pools.running(node) as client:
        options = RunBatchOptions(
            input_file=str(source), output_file=str(target), url=client.url, max_concurrency=1
        )
        code = await asyncio.to_thread(run, options)
    answers = list(map(msgspec.json.decode, target.read_bytes().splitlines()))
    assert [(each["custom_id"], each["response"]["status_code"]) for each in answers] == [
        *(("a", 200), ("b", 200), ("c", 400))
    ]
    assert answers[0]["response"]["body"]["choices"][0]["text"] == pools.REPLY[:4]
    assert answers[2]["response"]["body"]["error"]["code"]
    assert code == 1, "one request has an error"


def test_a_pool_is_started_for_a_file_and_ends_with_it(tmp_path: Path) -> None:
    source = written(tmp_path, [line(f"{number}") for number in range(20)])
    target = tmp_path / "out.jsonl"
    done = baton(
        *("run-batch", "-i", str(source), "-o", str(target)),
        *("--engine=sim", "--prefill=0", "--kv-blocks=400", "--max-model-len=2048"),
    )
    assert done.returncode == 0, done.stderr
    assert f"20 requests: 20 answered, 0 failed; {target}" in done.stderr
    answers = list(map(json.loads, target.read_text().splitlines()))
    assert sorted(int(each["custom_id"]) for each in answers) == list(range(20))
    assert {each["response"]["status_code"] for each in answers} == {200}
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in answers} <= {
        *range(1, 5)
    }
