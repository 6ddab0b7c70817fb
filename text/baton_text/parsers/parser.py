"""The kinds of parser, and the Reader that feeds one parser text and returns its pieces."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from baton_text.parsers.source import Source, Texts

T = TypeVar("T")
PieceKind = Literal["reasoning", "content", "call", "arguments"]
Tools = Mapping[str, Mapping[str, Any]]  # a function's name -> the JSON schema of its arguments
# Text that opens the assistant's message in prompts of the reasoning families.
_TURNS = (
    "<|im_start|>assistant",
    "<|im_assistant|>assistant<|im_middle|>",
    "<|start|>assistant",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|assistant|>",
    "<seed:bos>assistant",
    "]~b]ai",
    "[/INST]",
    "[/TOOL_RESULTS]",
    "<\uff5cAssistant\uff5c>",
    "<\uff5ctool\u2581outputs\u2581end\uff5c>",
)


class Piece(NamedTuple):
    """One addition to an answer.

    kind    "reasoning" and "content" append `text` to that field; "call" opens a call of the
            function named `text`; "arguments" appends `text` to the call's JSON arguments
    call    number of the call, from 0; only for "call" and "arguments"
    """

    kind: PieceKind
    text: str
    call: int = 0


Pieces = Generator[Piece | None, None, None]  # None: the parser waits for more text
Parse = Callable[[Source, Tools], Pieces]


@dataclass(frozen=True)
class ArgumentForm:
    """How a family writes the arguments of a call if not as one JSON object:

    for each argument before_key, the key, after_key, the value, after_value; `between` separates
    arguments. Values are JSON; with `plain_strings`, strings are plain text instead.

    key   a regex that a key must match to be read back
    """

    before_key: str
    after_key: str
    after_value: str = ""
    between: str = ""
    plain_strings: bool = False
    key: str = r"[^\s<>{}\"]+"


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls, from which a grammar can be built:

    open, then for each call before_name, the name, before_arguments, the arguments,
    after_arguments; `between` separates calls (None: at most one call); close ends them. Text that
    is an added token of the tokenizer stands for that token.

    arguments    how the arguments are written; None: as one JSON object
    also         other openings that the parser accepts, each as a pair: the text that makes the
                 parser look for a call, and the text between that and the name
    other_start  only for a form that starts with JSON: a regex for the first characters of text
                 that is no call; empty: any but the form's first character
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    open: str = ""
    between: str | None = ""
    close: str = ""
    arguments: ArgumentForm | None = None
    also: tuple[tuple[str, str], ...] = ()
    other_start: str = ""


@dataclass(frozen=True)
class MessageForm:
    """How a family writes an answer that is a list of messages, each with a header.

    markers   all markers of headers and ends
    content   the header of a message with content
    remark    the header of a message that may precede a call, and which is content too
    another   the end of a message and the start of the next one's header
    """

    markers: tuple[str, ...]
    content: str
    remark: str
    another: str


@dataclass(frozen=True)
class ToolParser:
    """Reads one family's calls.

    marks            a chat template that contains all of them selects this parser; empty: none does
    reads_special    its markers are special tokens, so the text must include special tokens
    reads_reasoning  it also reads reasoning, without a separate reasoning parser
    form             how the family writes calls; None if no grammar can enforce them
    messages         set if an answer is a list of messages
    short_ids        its chat template refuses ids of calls that are not 9 letters and digits
    """

    name: str
    parse: Parse
    marks: tuple[str, ...]
    reads_special: bool = False
    reads_reasoning: bool = False
    form: CallForm | None = None
    messages: MessageForm | None = None
    short_ids: bool = False


@dataclass(frozen=True)
class ReasoningParser:
    """Reads one family's reasoning: text between two markers at the start of an answer.

    begin, end     the two markers
    marks          a chat template that contains all of them selects this parser
    always         the answer begins inside reasoning unless the prompt closed it, even if the
                   prompt did not open it
    reads_special  its markers are special tokens, so the text must include special tokens
    call           text that opens a call and thereby also ends reasoning, if calls are read
    answer         markers around the text that follows the reasoning, if the family has them
    parse          reads the whole answer, for a family with reasoning in several places; only a
                   tool parser with `reads_reasoning` reads the calls of such a family
    messages       set if an answer is a list of messages
    """

    name: str
    begin: str
    end: str
    marks: tuple[str, ...]
    always: bool = False
    reads_special: bool = False
    call: str | None = None
    answer: tuple[str, str] | None = None
    parse: Parse | None = None
    messages: MessageForm | None = None

    def begun(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins inside reasoning: the prompt's part of the
        assistant message opens reasoning and does not close it."""
        ends = [at + len(turn) for turn in _TURNS if (at := prompt.rfind(turn)) >= 0]
        if not ends:
            end = prompt.rstrip()
            return end.endswith(self.begin) or (self.always and not end.endswith(self.end))
        message = prompt[max(ends) :].lstrip()
        if message.startswith(self.begin):
            return self.end not in message
        return self.always and not message


class Reader:
    """Reads one answer as its text arrives. `opened`: prompt text to read before the answer."""

    def __init__(self, pieces: Callable[[Source], Pieces], opened: str = "") -> None:
        self._opened = len(opened)
        self._source = Source()
        self._source.push(opened)
        self._pieces = pieces(self._source)

    def push(self, text: str) -> list[Piece]:
        """Take more text; return the pieces that are now certain."""
        self._source.push(text)
        return self._read()

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        self._source.ended = True
        return self._read()

    def reasoning_in(self, text: str) -> list[tuple[int, int]]:
        """The (start, end) character ranges of reasoning in the complete text of an answer: all
        between two markers, white space too. Only for an unused reader."""
        self.push(text)
        self.finish()
        opened = self._opened
        return [(max(0, a - opened), b - opened) for a, b in self._source.reasoning if b > opened]

    def _read(self) -> list[Piece]:
        pieces: list[Piece] = []
        texts: list[str] = []  # of the last piece
        for piece in self._pieces:
            if piece is None:
                break
            if not pieces or piece.kind == "call" or pieces[-1][::2] != piece[::2]:
                _join(pieces, texts)
                pieces.append(piece)
                texts = []
            texts.append(piece.text)
        else:
            if rest := self._source.take(len(self._source.unread)):
                _join(pieces, texts)
                return [*pieces, Piece("content", rest)]
        _join(pieces, texts)
        return pieces


def _join(pieces: list[Piece], texts: list[str]) -> None:
    """Replace the last piece's text by the concatenated `texts`."""
    if len(texts) > 1:
        pieces[-1] = pieces[-1]._replace(text="".join(texts))


def as_pieces(
    kind: PieceKind, texts: Texts[Any], call: int = 0
) -> Generator[Piece | None, None, Any]:
    """Yield each text as a piece of `kind`; return the return value of `texts`."""
    while True:
        try:
            text = next(texts)
        except StopIteration as stop:
            return stop.value
        yield None if text is None else Piece(kind, text, call)


def whole(texts: Texts[T]) -> Generator[None, None, tuple[str, T]]:
    """Collect all texts; return them as one string, with the return value of `texts`."""
    texts_read: list[str] = []
    while True:
        try:
            text = next(texts)
        except StopIteration as stop:
            return "".join(texts_read), stop.value
        if text is None:
            yield None
        else:
            texts_read.append(text)


def content(source: Source, *markers: str) -> Generator[Piece | None, None, str | None]:
    """Yield content up to a marker and return the marker; None if there is none.

    White space around the marker is dropped."""
    found: str | None = yield from as_pieces("content", source.until(*markers, trim=True))
    if found is not None:
        yield from source.skip_space()
    return found


def listed_calls(
    source: Source,
    number: int,
    before: str,
    read: Callable[[int, str], Generator[Piece | None, None, bool]],
) -> Generator[Piece | None, None, int]:
    """Read calls, numbered from `number`, of a list whose "[" was just read; return the next free
    number. The list ends after its last element that is a call.

    `read(number, before)` reads one element and returns whether it is a call. `before`, with the
    bracket, is the text that becomes content if the first element is none."""
    before += "[" + (yield from source.skip_space())
    while (yield from read(number, before)):
        number += 1
        before = ""
        yield from source.skip_space()
        comma = (yield from source.starts_with(",", "]")) == ","
        yield from source.skip_space()
        if not comma:
            break
    return number


def all_content(source: Source, tools: Tools) -> Pieces:
    """Parse an answer without calls: all of its text is content."""
    while not (yield from source.over()):
        yield Piece("content", source.take(len(source.unread)))
