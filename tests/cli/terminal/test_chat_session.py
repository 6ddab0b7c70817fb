"""A chat's questions, answers and commands, with a real router and a node whose reply is known."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from baton_cli.errors import CommandError
from baton_cli.terminal.chat_session import ChatSession, dims
from baton_cli.terminal.conversation import Conversation
from baton_cli.terminal.remote_router import RemoteRouter
from baton_protocol.link import RunJob
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

HOSTILE = "\x1b]0;owned\x07red\x1b[31m\x9b2J\r"


class Served(NamedTuple):
    url: str
    node: FakeNode

    async def chat(self, *lines: str, system: str = "", key: str = "the-key") -> str:
        """What a chat shows in which these lines are typed."""
        out = io.StringIO()
        session = ChatSession(
            RemoteRouter(self.url, key), Conversation(system), None, out, reader(lines)
        )
        await asyncio.to_thread(session.run)
        return out.getvalue()

    def prompts(self) -> list[str]:
        """The prompts that the node got. Its tokens are bytes, and some marks."""
        return [
            bytes(token for token in frame.request.prompt_ids if token < 256).decode()
            for frame in self.node.got
            if isinstance(frame, RunJob)
        ]


def reader(lines: Iterable[str]) -> Callable[[str], str]:
    """As input(): raises EOFError at the end."""
    rest = iter(lines)

    def read(prompt: str) -> str:
        for line in rest:
            return line
        raise EOFError

    return read


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "keys").write_text("acme the-key\n")
    async with FakeNode("decode-0", "decode", max_model_len=2048) as node:
        settings = RouterSettings(port=0, nodes=(node.address,), api_keys=str(tmp_path / "keys"))
        async with Router(settings) as router:
            await until(lambda: len(list(router.view.ready())) == 1)
            yield Served(f"http://127.0.0.1:{router.port}", node)


@pytest.mark.integration
async def test_a_question_has_the_turns_before_it_and_the_system_prompt(served: Served) -> None:
    shown = await served.chat("First?", '"""Second,', 'of two lines"""', system="Be brief.")
    assert shown.count("Hello, world!\n") == 2
    assert " on decode-0" in shown
    _, second = served.prompts()
    parts = ("Be brief.", "First?", "Hello, world!", "Second,\nof two lines")
    places = [second.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.integration
async def test_retry_asks_the_last_question_again_without_its_answer(served: Served) -> None:
    await served.chat("First?", "Second?", "/retry")
    _, second, again = served.prompts()
    assert again == second


@pytest.mark.integration
async def test_clear_forgets_the_turns_and_keeps_the_system_prompt(served: Served) -> None:
    await served.chat("/system Be brief.", "First?", "/clear", "Second?")
    *_, last = served.prompts()
    assert "First?" not in last
    assert "Be brief." in last


@pytest.mark.integration
async def test_control_characters_of_an_answer_are_shown_escaped(served: Served) -> None:
    served.node.script.reply = HOSTILE.encode()
    shown = await served.chat("Go on.", "/explain")
    assert r"\x1b]0;owned\x07red\x1b[31m\x9b2J\r" in shown
    assert {char for char in shown if char < " " or "\x7f" <= char <= "\x9f"} == {"\n"}


@pytest.mark.integration
async def test_explain_shows_where_and_why_the_last_answer_ran(served: Served) -> None:
    shown = await served.chat("/explain", "Hello?", "/explain")
    assert "error: no request was answered yet; ask a question first" in shown
    assert "attempt 1: decode decode-0 (no_prefill)" in shown


@pytest.mark.integration
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/help", "/retry"),
        ("/model", "* fake-model"),
        ("/model fake-model", "* fake-model"),
        ("/model other", "error: the pool has no model other; /model lists them"),
        ("/retry", "error: there is no question to ask again; type one"),
        ("/system", "no system prompt; /system TEXT"),
        ("/shout", "error: /shout is no command; /help lists them"),
        (" ", ""),
    ],
)
async def test_a_slash_command_answers(served: Served, line: str, words: str) -> None:
    assert words in await served.chat(line)
    assert served.prompts() == []


@pytest.mark.integration
async def test_quit_ends_the_chat(served: Served) -> None:
    await served.chat("/quit", "Never asked?")
    assert served.prompts() == []


@pytest.mark.integration
async def test_a_failed_answer_shows_the_router_s_message_and_is_no_turn(served: Served) -> None:
    served.node.script.run = "fail"
    shown = await served.chat("First?")
    assert "error: " in shown
    assert "the engine said no" in shown
    served.node.script.run = "answer"
    await served.chat("Second?")
    assert "First?" not in served.prompts()[-1]


@pytest.mark.integration
async def test_a_chat_with_an_unknown_key_ends_with_the_router_s_message(served: Served) -> None:
    with pytest.raises(CommandError, match=r"the API key is unknown; .* \(HTTP 401\)"):
        await served.chat("Hello?", key="wrong")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "environ", "dimmed"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
)
def test_remarks_are_dimmed_on_a_terminal_that_wants_it(
    out: io.StringIO, environ: dict[str, str], dimmed: bool
) -> None:
    assert dims(out, environ) is dimmed
