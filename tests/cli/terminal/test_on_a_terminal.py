"""`baton chat` and `baton top` on a real terminal, and on pipes, with a pool of simulated nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping

import pytest

from tests.support.clients.http import text_of
from tests.support.pools.baton_up import Pool
from tests.support.project.command import baton
from tests.support.terminal import Terminal

pytestmark = pytest.mark.integration

# 20 ms per token: an answer of several thousand is never complete when a test stops it.
FLAGS = ("--engine", "sim", "--sim-decode-ms", "20")
LONG = "4000"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Pool(FLAGS) as pool:
        yield pool.url


def on_a_terminal(*words: str, variables: Mapping[str, str] | None = None) -> Terminal:
    return Terminal([sys.executable, "-m", "baton_cli", *words], variables=variables)


def running(url: str) -> int:
    return int(json.loads(text_of(url, "/pool"))["totals"]["requests_running"])


def test_a_chat_answers_explains_asks_again_and_ends(url: str) -> None:
    with on_a_terminal("chat", "--url", url, "--max-tokens", "8") as terminal:
        terminal.wait_for("/help lists commands")
        terminal.type("Hello\n")
        terminal.wait_for("8 tokens in")
        terminal.type("/explain\n")
        terminal.wait_for("attempt 1: decode decode-0")
        terminal.type("/retry\n")
        terminal.wait_for("8 tokens in", times=2)
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0


def test_ctrl_c_stops_an_answer_and_its_request_and_the_chat_goes_on(url: str) -> None:
    with on_a_terminal("chat", "--url", url, "--max-tokens", LONG) as terminal:
        terminal.wait_for("/help lists commands")
        terminal.type("half a question")
        terminal.wait_for("> half a question")
        terminal.type("\x03")
        terminal.wait_for("> half a question\n>")
        terminal.type("Hello\n")
        terminal.wait_until(lambda: terminal.after("> Hello") != "", "begin its answer")
        assert running(url) == 1
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.wait_until(lambda: running(url) == 0, "end the request")
        terminal.type("/explain\n")
        terminal.wait_for("status 499")
        terminal.type("/quit\n")
        assert terminal.wait_for_end() == 0


def test_no_color_leaves_out_the_dimming(url: str) -> None:
    dim = b"\x1b[2m"
    for variables, has_dim in (({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)):
        with on_a_terminal("chat", "--url", url, variables=variables) as terminal:
            terminal.wait_for("/help lists commands")
            assert (dim in terminal.raw) is has_dim


def test_top_shows_nodes_and_requests_follows_the_window_and_ends_with_q(url: str) -> None:
    with on_a_terminal("chat", "--url", url, "--max-tokens", LONG) as chat:
        chat.wait_for("/help lists commands")
        chat.type("Hello\n")
        with on_a_terminal("top", "--url", url) as terminal:
            terminal.wait_for("decode-0")
            text = terminal.wait_for("chat      running")
            assert "nodes: 2 of 2 ready; requests: 1 running" in text
            terminal.type("pr")
            terminal.wait_for("requests by prompt, reversed")
            terminal.resize(60, 8)
            terminal.wait_for("more lines; enlarge the window")
            terminal.resize(120, 30)
            terminal.wait_until_gone("more lines")
            chat.type("\x03")
            chat.wait_for("stopped")
            terminal.wait_until_gone("chat      running")
            terminal.type("q")
            assert terminal.wait_for_end() == 0
            assert b"\x1b[31m" not in terminal.raw


def test_on_pipes_a_chat_is_one_question_and_its_plain_answer(url: str) -> None:
    done = baton("chat", "--url", url, "--max-tokens", "8", given="Hello\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.encode()) > 1
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("words", "given", "error"),
    [
        (("chat", "--url", "http://127.0.0.1:1"), "Hello", "no router answers at http://127"),
        (("top", "--url", "http://127.0.0.1:1"), "", "no router answers at http://127.0.0.1:1"),
        (("chat", "--url", "127.0.0.1"), "Hello", "--url 127.0.0.1 is not a URL; write http://"),
        (("chat", "--api-key", "ä"), "Hello", "the API key has characters that no HTTP header"),
        (("chat",), " \n", "stdin has no question; as in: echo 'What is a KV cache?' | baton"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(
    words: tuple[str, ...], given: str, error: str
) -> None:
    done = baton(*words, given=given)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith(f"baton: {error}")
    assert done.stdout == ""


def test_on_a_pipe_top_prints_a_table_or_json_once(url: str) -> None:
    table = baton("top", "--url", url, "--once")
    assert (table.returncode, table.stderr) == (0, "")
    assert "prefill-0  prefill  ready" in table.stdout
    assert "\x1b" not in table.stdout
    snapshot = json.loads(baton("top", "--url", url, "--once", "--json").stdout)
    assert [node["id"] for node in snapshot["nodes"]] == ["decode-0", "prefill-0"]
    assert snapshot["totals"]["requests_per_s"] is not None
