"""gpt-oss: an answer is a list of messages, each with a header (OpenAI's harmony format).

    <|channel|>analysis<|message|>TEXT<|end|>                                     reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS
    <|call|>                                                                      a call
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>                   content

A header holds the author (for the first message, the prompt already contains it), the channel
after <|channel|> and the content type after <|constrain|>. A recipient, to=NAME, may follow any of
these. A message to a function is a call on any channel. Otherwise the analysis channel is
reasoning, and every other channel is content: final, and commentary that announces calls. The
parser puts a line break between two messages of one kind. It drops a header without a message,
unless another marker follows and the header holds text that no header has: that text is content.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from baton_text.parsers.json_calls import arguments_call
from baton_text.parsers.parser import (
    CallForm,
    MessageForm,
    Piece,
    PieceKind,
    Pieces,
    ReasoningParser,
    ToolParser,
    Tools,
    content,
    whole,
)
from baton_text.parsers.source import Source

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_TO = "to="
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"(?<!\S)to=(\S+)")
_HEADER = re.compile(r"(?:\s|\b(?:assistant|analysis|commentary|final|json)\b|to=\S*)*")

MESSAGES = MessageForm(
    markers=_MARKERS,
    content=f"{CHANNEL}final{MESSAGE}",
    remark=f"{CHANNEL}commentary{MESSAGE}",
    another=f"{END}{START}assistant",
)
Header = dict[str, str]  # marker -> the text that follows it


def _with_calls(source: Source, tools: Tools) -> Pieces:
    return _messages(source, tools, with_calls=True)


def _without_calls(source: Source, tools: Tools) -> Pieces:
    return _messages(source, tools, with_calls=False)


def _messages(source: Source, tools: Tools, with_calls: bool) -> Pieces:
    calls = 0
    seen: set[PieceKind] = set()
    marker = yield from _first_marker(source)
    while marker is not None:
        if marker in (END, CALL, RETURN):
            marker = yield from content(source, *_MARKERS)
            continue
        header, marker = yield from _header(source, marker)
        if marker != MESSAGE:
            text = "".join(header.values())
            if marker is not None and not _HEADER.fullmatch(text):
                yield Piece("content", text)
            continue
        start = source.place
        yield from source.skip_space()
        kind: PieceKind = "content"
        if with_calls and (name := _function(header, tools)):
            if (yield from arguments_call(source, name, calls, *_MARKERS)):
                calls += 1
                yield from source.skip_space()
        elif header.get(CHANNEL, "").split()[:1] == ["analysis"]:
            kind = "reasoning"
        marker = yield from _message(source, kind, seen)
        if kind == "reasoning":
            source.note_reasoning(start, marker)


def _first_marker(source: Source) -> Generator[Piece | None, None, str | None]:
    """Read up to the first marker and return it; START if the answer begins inside a header.

    An answer begins inside a header (the prompt ends with <|start|>assistant), or inside a message
    that it continues."""
    space = yield from source.skip_space()
    if (yield from source.starts_with(_TO)):
        source.put_back(_TO)
        return START
    source.put_back(space)
    return (yield from content(source, *_MARKERS))


def _header(source: Source, marker: str) -> Generator[None, None, tuple[Header, str | None]]:
    """Read the header that starts with `marker`; return it with the marker that ends it.

    That marker is MESSAGE if a message follows, and None if the answer ends first."""
    header: Header = {}
    found: str | None = marker
    while found in (START, CHANNEL, CONSTRAIN) and not (found == START and header):
        begin = found
        text, found = yield from whole(source.until(*_MARKERS))
        header[begin] = header.get(begin, "") + text
    return header, found


def _function(header: Header, tools: Tools) -> str | None:
    """The name of the function that the header addresses, or None."""
    match = _RECIPIENT.search(" ".join(header.values()))
    if match is None:
        return None
    name = match.group(1)
    if name.startswith(_FUNCTIONS):
        return name.removeprefix(_FUNCTIONS) or None
    return name if name in tools else None


def _message(
    source: Source, kind: PieceKind, seen: set[PieceKind]
) -> Generator[Piece | None, None, str | None]:
    """Yield a message as pieces of `kind`; return the marker that ends it, None at the end.

    `seen` holds the kinds of the messages so far."""
    texts = source.until(*_MARKERS, trim=True)
    first = True
    while True:
        try:
            text = next(texts)
        except StopIteration as stop:
            found: str | None = stop.value
            return found
        if text is None:
            yield None
            continue
        if first and kind in seen:
            yield Piece(kind, "\n")
        first = False
        seen.add(kind)
        yield Piece(kind, text)


GPT_OSS = ToolParser(
    name="gpt_oss",
    parse=_with_calls,
    marks=(START, CHANNEL, MESSAGE),
    reads_special=True,
    reads_reasoning=True,
    # <|call|> is one of the model's EOS tokens, so an answer has at most one call.
    form=CallForm(
        before_name=f"{CHANNEL}commentary {_TO}{_FUNCTIONS}",
        before_arguments=f" {CONSTRAIN}json{MESSAGE}",
        after_arguments="",
        between=None,
    ),
    messages=MESSAGES,
)
# The text after `end` begins like an answer without reasoning: with a channel.
GPT_OSS_REASONING = ReasoningParser(
    name="gpt_oss",
    begin=f"{CHANNEL}analysis{MESSAGE}",
    end=MESSAGES.another,
    marks=GPT_OSS.marks,
    reads_special=True,
    parse=_without_calls,
    messages=MESSAGES,
)
