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

from baton_cli.bench.client import Server, TimedRequest, first_model, open_session, send_all
from baton_cli.bench.serve_options import ServeOptions
from baton_cli.bench.stream import RequestOutcome
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


def test_random_prompts_get_exactly_the_requested_tokens(pool: Pool, tmp_path: Path) -> None:
    more = ("--ignore-eos", "--max-concurrency", "2", "--goodput", "ttft:1e6", "itl:1e6")
    report = figures(
        tmp_path / "f", "serve", "--base-url", pool.url, *SMALL, *more, "--save-detailed"
    )
    assert (report["model_id"], report["completed"], report["failed"]) == (pool.model, 6, 0)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (6 * 40, 6 * 8)
    assert report["total_cached_tokens"] == 0
    assert 1 <= report["max_concurrent_requests"] <= 2
    assert report["good_requests"] == 6
    assert report["request_goodput"] == pytest.approx(report["request_throughput"])
    assert report["output_lens"] == [8] * 6
    assert all(
        0 < ttft <= e2el for ttft, e2el in zip(report["ttfts"], report["e2els"], strict=True)
    )


def test_a_chat_with_token_ids_counts_every_token(pool: Pool, tmp_path: Path) -> None:
    chat = ("--endpoint", "/v1/chat/completions", "--tokenizer", "bytes", "--vocab-size", "100")
    more = ("--ignore-eos", "--return-token-ids", "--request-rate", "200")
    report = figures(tmp_path / "f", "serve", "--base-url", pool.url, *SMALL, *chat, *more)
    assert (report["completed"], report["total_output_tokens"]) == (6, 6 * 8)
    assert report["total_input_tokens"] > 6 * 40  # the chat template adds tokens


def test_a_trace_s_repeated_prefixes_are_found_in_the_cache(pool: Pool, tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    trace = "\n".join(json.dumps(line | {"timestamp": 300 * n}) for n in range(3))
    (tmp_path / "trace").write_text(trace)
    before = pool.totals()["cached_prompt_tokens_total"]
    flags = ("--dataset-name", "trace", "--dataset-path", str(tmp_path / "trace"), "--ignore-eos")
    report = figures(
        tmp_path / "f", "serve", "--base-url", pool.url, *flags, "--max-concurrency", "1"
    )
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (3 * 600, 3 * 4)
    assert (report["request_rate"], report["duration"] >= 0.6) == ("trace", True)
    assert report["total_cached_tokens"] >= 2 * 512
    assert pool.totals()["cached_prompt_tokens_total"] - before == report["total_cached_tokens"]


def test_save_result_writes_a_named_file_without_warm_up_requests(
    pool: Pool, tmp_path: Path
) -> None:
    flags = ("--base-url", pool.url, *SMALL, "--num-warmups", "2", "--save-result")
    done = baton("bench", "serve", *flags, where=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    [path] = tmp_path.iterdir()
    assert path.name.startswith(f"baton-infqps-{pool.model}-")
    assert json.loads(path.read_text())["completed"] == 6


def test_failed_requests_are_reported_and_give_exit_code_1(pool: Pool) -> None:
    flags = ("--base-url", pool.url, *SMALL, "--model", "nobody")
    done = baton("bench", "serve", *flags)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "failed 6 times: HTTP 404 model_not_found"
    assert baton("bench", "serve", *flags, "--allow-failures").returncode == 0
    warmed = baton("bench", "serve", *flags, "--num-warmups", "1")
    assert (warmed.returncode, warmed.stdout) == (1, "")
    assert "a warm-up request failed: HTTP 404 model_not_found" in warmed.stderr


def test_an_unreachable_server_is_a_one_line_error() -> None:
    done = baton("bench", "serve", "--port", "1")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("baton: cannot query http://127.0.0.1:1/v1/models: no connection")


def test_goodput_goals_may_be_separate_arguments_or_a_comma_separated_list() -> None:
    argv = ["bench", "serve", "--goodput", "ttft:5", "itl:6,e2el:7", "--header", "a=b"]
    _, options = read_command([*argv, "--header", "c=d=e"], {})
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
def test_an_invalid_server_flag_is_named_in_the_error(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        server_of(ServeOptions(**flags), "")


def test_an_ipv6_host_is_put_in_brackets() -> None:
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


async def outcome_of(handler: Handler, timeout_s: float = 60.0) -> RequestOutcome:
    async with serving(handler, timeout_s) as server, open_session() as http:
        [outcome], _ = await send_all(
            http,
            server,
            [TimedRequest(0.0, b"{}", 2, 3)],
            max_concurrency=None,
            progress=lambda _: None,
        )
        return outcome


async def start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
    return response


async def test_a_broken_connection_is_the_request_s_error() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        assert request.transport is not None
        request.transport.abort()
        return response

    outcome = await outcome_of(cut)
    assert outcome.error.startswith("the connection broke: Client")
    assert outcome.output_tokens == 1


async def test_a_request_past_its_timeout_fails() -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await asyncio.sleep(3600)
        return response

    assert (await outcome_of(hang, timeout_s=0.3)).error == "timeout after 0.3 s"


async def test_an_unreadable_chunk_is_the_request_s_error() -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="data: <html>\n\n")

    assert (await outcome_of(page)).error.startswith("a chunk of the stream cannot be read: ")


async def test_an_error_body_without_json_is_reported_by_its_status() -> None:
    async def bad_gateway(request: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="<html>")

    assert (await outcome_of(bad_gateway)).error == "HTTP 502 Bad Gateway"


async def test_max_concurrency_bounds_the_requests_in_flight() -> None:
    running = most = 0
    three = asyncio.Barrier(3)

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        response = await start_stream(request)
        await three.wait()
        running -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    async with serving(slow) as server, open_session() as http:
        requests = [TimedRequest(0.0, b"{}", 1, 3)] * 12
        outcomes, _ = await send_all(
            http, server, requests, max_concurrency=3, progress=lambda _: None
        )
    assert [one.error for one in outcomes] == [""] * 12
    assert most == 3


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (
            401,
            '{"error": {"code": "invalid_api_key"}}',
            "HTTP 401 invalid_api_key; name the model with",
        ),
        (200, '{"data": []}', "lists no model"),
        (200, "<html>", "lists no model"),
    ],
)
async def test_a_server_that_lists_no_model_is_named_in_the_error(
    status: int, body: str, problem: str
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    async with serving(answer) as server, open_session() as http:
        with pytest.raises(CommandError, match=problem):
            await first_model(http, server)
