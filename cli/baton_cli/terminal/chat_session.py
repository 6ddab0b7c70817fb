"""A chat on a terminal: questions, answers as they arrive, slash commands.

In: lines that a person types, a router. Out: text on the terminal. Ctrl-C stops an answer and its
request, or discards the line being typed; Ctrl-D leaves. Lines typed before come back with the
arrow keys, from memory only: the chat writes no file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple, TextIO

from baton_cli.errors import CommandError
from baton_cli.terminal.conversation import Conversation, Piece, StreamedAnswer, Turn, ask
from baton_cli.terminal.explain_text import explanation_lines, find_explanation
from baton_cli.terminal.remote_router import RemoteRouter
from baton_cli.terminal.text import visible, visible_line

PROMPT = "> "
CONTINUED = ". "
BLOCK = '"""'  # begins and ends a question of several lines
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Command(NamedTuple):
    """A slash command. `run` gets what follows its name; False ends the chat."""

    usage: str
    help: str
    run: Callable[[str], bool | None]


def dims(out: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether remarks may be dimmed: on a terminal, unless NO_COLOR is set (no-color.org)."""
    return out.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class ChatSession:
    """One chat. `read` returns the next line, and raises EOFError at the end, as input() does."""

    def __init__(
        self,
        router: RemoteRouter,
        conversation: Conversation,
        max_tokens: int | None,
        out: TextIO,
        read: Callable[[str], str],
    ) -> None:
        self._router = router
        self._conversation = conversation
        self._max_tokens = max_tokens
        self._out = out
        self._read = read
        self._dims = dims(out)
        self._model = ""  # the router's first one
        self._question = ""  # the last one, also if it got no answer
        self._turns_before = 0
        self._request_id = ""
        self._commands = {
            "/explain": Command("", "show where and why the last answer ran", self._explain),
            "/retry": Command("", "ask the last question again", self._retry),
            "/system": Command("[TEXT]", "show or set the system prompt", self._system),
            "/clear": Command("", "forget the conversation, keep the system prompt", self._clear),
            "/model": Command("[NAME]", "list the pool's models, or choose one", self._choose),
            "/help": Command("", "list these commands", self._help),
            "/quit": Command("", "leave, as Ctrl-D does", lambda rest: False),
        }

    def run(self) -> None:
        """Chat until the end of the input. Raise CommandError if no router answers at the start."""
        models = self._models()
        name = visible_line(models[0]) if models else "a pool without a model yet"
        self._remark(f"{name} at {self._router.url}; /help lists commands, Ctrl-D leaves")
        while True:
            try:
                text = self._next_text()
            except EOFError:
                self._out.write("\n")
                return
            except KeyboardInterrupt:
                self._out.write("\n")
                continue
            try:
                if not self._obey(text):
                    return
            except CommandError as error:
                self._remark(f"error: {visible(str(error))}")
            except KeyboardInterrupt:
                self._remark("stopped")

    def _next_text(self) -> str:
        """The next line, or the lines between two BLOCK marks."""
        line = self._read(PROMPT)
        if not line.startswith(BLOCK):
            return line
        lines = [line.removeprefix(BLOCK)]
        while not lines[-1].endswith(BLOCK):
            lines.append(self._read(CONTINUED))
        return "\n".join(lines).removesuffix(BLOCK).strip("\n")

    def _obey(self, text: str) -> bool:
        """Run a command, or ask the question. False ends the chat."""
        if not text.strip():
            return True
        if not text.startswith("/"):
            self._ask(text)
            return True
        name, _, rest = text.partition(" ")
        if (command := self._commands.get(name.strip())) is None:
            raise CommandError(
                f"{name} is no command; /help lists them, and a question that begins with a slash"
                " needs a space before it"
            )
        return command.run(rest.strip()) is not False

    def _ask(self, question: str) -> None:
        self._question, self._request_id = question, ""
        self._turns_before = len(self._conversation.turns)
        messages = self._conversation.messages(question)
        begun = time.monotonic()
        with closing(ask(self._router, messages, self._max_tokens, self._model)) as answer:
            self._request_id = answer.request_id
            try:
                self._show(answer.pieces())
            finally:
                # Stopped or broken: its beginning is part of the conversation.
                if answer.text:
                    self._conversation.turns.append(Turn(question, answer.text))
        self._remark(_summary(answer, time.monotonic() - begun))

    def _show(self, pieces: Iterator[Piece]) -> None:
        last = Piece("answer", "\n")
        try:
            for piece in pieces:
                if piece.kind != last.kind and not last.text.endswith("\n"):
                    self._out.write("\n")
                text = visible(piece.text)
                self._out.write(self._dim(text) if piece.kind == "reasoning" else text)
                self._out.flush()
                last = piece
        finally:
            if not last.text.endswith("\n"):
                self._out.write("\n")

    def _remark(self, text: str) -> None:
        self._out.write(f"{self._dim(text)}\n")
        self._out.flush()

    def _dim(self, text: str) -> str:
        return f"{DIM}{text}{PLAIN}" if self._dims else text

    def _explain(self, rest: str) -> None:
        if not self._request_id:
            raise CommandError("no request was answered yet; ask a question first")
        for line in explanation_lines(find_explanation(self._router, self._request_id)):
            self._out.write(f"{line}\n")

    def _retry(self, rest: str) -> None:
        if not self._question:
            raise CommandError("there is no question to ask again; type one")
        del self._conversation.turns[self._turns_before :]
        self._ask(self._question)

    def _system(self, rest: str) -> None:
        self._conversation.system = rest or self._conversation.system
        shown = visible(self._conversation.system)
        self._remark(f"system prompt: {shown}" if shown else "no system prompt; /system TEXT")

    def _clear(self, rest: str) -> None:
        self._conversation.turns.clear()
        self._question, self._request_id, self._turns_before = "", "", 0
        self._remark("the conversation is empty")

    def _choose(self, rest: str) -> None:
        models = self._models()
        if rest and rest not in models:
            raise CommandError(f"the pool has no model {rest}; /model lists them")
        self._model = rest or self._model
        chosen = self._model or next(iter(models), "")
        for name in models:
            self._remark(f"{'*' if name == chosen else ' '} {visible_line(name)}")

    def _help(self, rest: str) -> None:
        for name, command in self._commands.items():
            self._remark(f"{f'{name} {command.usage}':16} {command.help}")
        self._remark(f"{BLOCK:16} begins and ends a question of several lines")
        self._remark(f"{'Ctrl-C':16} stops an answer")

    def _models(self) -> list[str]:
        try:
            return [str(model["id"]) for model in self._router.ask("/v1/models")["data"]]
        except (KeyError, TypeError) as error:
            raise CommandError(f"{self._router.url} is not a Baton router: {error!r}") from error


def _summary(answer: StreamedAnswer, seconds: float) -> str:
    cut = ", cut at its maximum length" if answer.finish == "length" else ""
    # As in "prefill=- decode=decode-0 reason=...".
    names = (part.partition("=")[2] for part in answer.placement.split()[:2])
    nodes = " and ".join(visible_line(name) for name in names if name not in ("", "-"))
    return f"[{answer.tokens} tokens in {seconds:.1f} s{f' on {nodes}' if nodes else ''}{cut}]"
