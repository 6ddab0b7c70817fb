"""`baton bench serve` against a real pool, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton_cli.bench.client import Job, Server, first_model, send_all, session
from baton_cli.bench.serve_options import ServeOptions
from baton_cli.bench.stream import Outcome
from baton_cli.commands.bench_serve import server_of
from baton_cli.errors import CommandError, UsageError
from baton_cli.main import read_command
from tests.support.pools.baton_up import Pool
from tests.support.project.command import baton, figures

pytestmark = pytest.mark.integration

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SMALL = ("--num-prompts", "6", "--random-input-len", "40", "--random-output-len", "8")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(["--engine", "sim", "--prefill", "0", "--kv-blocks", "1000"]) as running:
        yield running


def test_random_prompts_at_a_pool(pool: Pool, tmp_path: Path) -> None:
    more = ("--ignore-eos", "--max-concurrency", "2", "--goodput", "ttft:1e6", "itl:1e6")
    found = figures(
        tmp_path / "f", "serve", "--base-url", pool.url, *SMALL, *more, "--save-detailed"
    )
    assert (found["model_id"], found["completed"], found["failed"]) == (pool.model, 6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6 * 40, 6 * 8)
    assert found["total_cached_tokens"] == 0
    assert 1 <= found["max_concurrent_requests"] <= 2
    assert found["good_requests"] == 6
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["output_lens"] == [8] * 6
    assert all(0 < ttft <= e2el for ttft, e2el in zip(found["ttfts"], found["e2els"], strict=True))


def test_a_chat_at_a_pool_with_ids(pool: Pool, tmp_path: Path) -> None:
    chat = ("--endpoint", "/v1/chat/completions", "--tokenizer", "bytes", "--vocab-size", "100")
    more = ("--ignore-eos", "--return-token-ids", "--request-rate", "200")
    found = figures(tmp_path / "f", "serve", "--base-url", pool.url, *SMALL, *chat, *more)
    assert (found["completed"], found["total_output_tokens"]) == (6, 6 * 8)
    assert found["total_input_tokens"] > 6 * 40  # the template's words beside the prompt's


def test_a_trace_finds_its_own_prefixes_cached(pool: Pool, tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    trace = "\n".join(json.dumps(line | {"timestamp": 300 * n}) for n in range(3))
    (tmp_path / "trace").write_text(trace)
    before = pool.totals()["cached_prompt_tokens_total"]
    words = ("--dataset-name", "trace", "--dataset-path", str(tmp_path / "trace"), "--ignore-eos")
    found = figures(
        tmp_path / "f", "serve", "--base-url", pool.url, *words, "--max-concurrency", "1"
    )
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (3 * 600, 3 * 4)
    assert (found["request_rate"], found["duration"] >= 0.6) == ("trace", True)
    assert found["total_cached_tokens"] >= 2 * 512
    assert pool.totals()["cached_prompt_tokens_total"] - before == found["total_cached_tokens"]


def test_warm_up_is_not_counted_and_a_file_is_named_for_it(pool: Pool, tmp_path: Path) -> None:
    words = ("--base-url", pool.url, *SMALL, "--num-warmups", "2", "--save-result")
    done = baton("bench", "serve", *words, where=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    [path] = tmp_path.iterdir()
    assert path.name.startswith(f"baton-infqps-{pool.model}-")
    assert json.loads(path.read_text())["completed"] == 6


def test_failures_are_told_and_make_the_exit_code(pool: Pool) -> None:
    words = ("--base-url", pool.url, *SMALL, "--model", "nobody")
    done = baton("bench", "serve", *words)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "failed 6 times: HTTP 404 model_not_found"
    assert baton("bench", "serve", *words, "--allow-failures").returncode == 0
    warm = baton("bench", "serve", *words, "--num-warmups", "1")
    assert (warm.returncode, warm.stdout) == (1, "")
    assert "a warm-up request failed: HTTP 404 model_not_found" in warm.stderr


def test_a_server_that_is_not_there_is_one_line() -> None:
    done = baton("bench", "serve", "--port", "1")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("baton: http://127.0.0.1:1/v1/models cannot be asked: no connection")


def test_goals_may_be_words_or_a_list() -> None:
    words = ["bench", "serve", "--goodput", "ttft:5", "itl:6,e2el:7", "--header", "a=b"]
    _, options = read_command([*words, "--header", "c=d=e"], {})
    assert isinstance(options, ServeOptions)
    assert options.goodput == ("ttft:5", "itl:6", "e2el:7")
    assert server_of(options, "k").headers == {
        "Content-Type": "application/json",
        "Authorization": "Bearer k",
        "a": "b",
        "c": "d=e",
    }


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"base_url": "host:80"}, "--base-url host:80: give http://HOST:PORT"),
        ({"endpoint": "v1"}, "--endpoint v1: give a path"),
        ({"header": ("x",)}, "--header x: give NAME=VALUE"),
    ],
)
def test_a_server_that_cannot_be_is_named(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        server_of(ServeOptions(**flags), "")


def test_an_address_of_ipv6_is_put_in_brackets() -> None:
    assert server_of(ServeOptions(host="::1"), "").url == "http://[::1]:8000/v1/completions"


@asynccontextmanager
async def serving(handler: Handler, timeout_s: float = 60.0) -> AsyncIterator[Server]:
    """A server that answers each request with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    base = f"http://{host}:{port}"
    try:
        yield Server(base=base, url=base + "/v1/completions", headers={}, timeout_s=timeout_s)
    finally:
        await runner.cleanup()


async def outcome_of(handler: Handler, timeout_s: float = 60.0) -> Outcome:
    async with serving(handler, timeout_s) as server, session() as http:
        [found], _ = await send_all(
            http, server, [Job(0.0, b"{}", 2, 3)], max_concurrency=None, progress=lambda _: None
        )
        return found


async def begun(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
    return response


async def test_a_connection_that_breaks_is_a_reason() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = await begun(request)
        assert request.transport is not None
        request.transport.abort()
        return response

    found = await outcome_of(cut)
    assert found.error.startswith("the connection broke: Client")
    assert found.output_tokens == 1


async def test_a_request_that_does_not_end_is_given_up() -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        response = await begun(request)
        await asyncio.sleep(3600)
        return response

    assert (await outcome_of(hang, timeout_s=0.3)).error == "not over after 0.3 s"


async def test_an_answer_that_is_no_stream_of_chunks_is_a_reason() -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="data: <html>\n\n")

    assert (await outcome_of(page)).error.startswith("a chunk of the stream cannot be read: ")


async def test_an_error_without_json_is_told_by_its_status() -> None:
    async def away(request: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="<html>")

    assert (await outcome_of(away)).error == "HTTP 502 Bad Gateway"


async def test_no_more_requests_run_at_once_than_allowed() -> None:
    running = most = 0
    three = asyncio.Barrier(3)

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        response = await begun(request)
        await three.wait()
        running -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    async with serving(slow) as server, session() as http:
        jobs = [Job(0.0, b"{}", 1, 3)] * 12
        found, _ = await send_all(http, server, jobs, max_concurrency=3, progress=lambda _: None)
    assert [one.error for one in found] == [""] * 12
    assert most == 3


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (401, '{"error": {"code": "invalid_api_key"}}', "HTTP 401 invalid_api_key; name it with"),
        (200, '{"data": []}', "names no model"),
        (200, "<html>", "names no model"),
    ],
)
async def test_a_server_that_tells_no_model_is_named(status: int, body: str, problem: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    async with serving(answer) as server, session() as http:
        with pytest.raises(CommandError, match=problem):
            await first_model(http, server)
