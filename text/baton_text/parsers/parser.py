"""What a parser is, and how its pieces come out as text comes in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from baton_text.parsers.source import Source, Texts

T = TypeVar("T")
PieceKind = Literal["reasoning", "content", "call", "arguments"]
Tools = Mapping[str, Mapping[str, Any]]  # a function's name -> the JSON schema of its arguments


class Piece(NamedTuple):
    """What a text adds to an answer: to its `reasoning` or its `content`; or a `call`, whose `text`
    is the function's name; or to the `arguments` of call number `call`, a JSON object's text."""

    kind: PieceKind
    text: str
    call: int = 0


Pieces = Generator[Piece | None, None, None]  # None: it waits for more text
Parse = Callable[[Source, Tools], Pieces]


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls, so that a grammar can ask for them:

    open, then per call before_name, the name, before_arguments, the arguments as a JSON object,
    after_arguments; `between` two calls (None: there is one call at most); close at the end.
    What is a token of the tokenizer is that token; other text is text.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    open: str = ""
    between: str | None = ""
    close: str = ""


@dataclass(frozen=True)
class ToolParser:
    """`marks` all stand in the chat templates of the models whose answers it reads. With
    `reads_special` its markers are special tokens, so text is read with them. With
    `reads_reasoning` it reads reasoning too, and there is no reasoning parser beside it. `form` is
    None where arguments are not JSON, or a call has no fixed form."""

    name: str
    parse: Parse
    marks: tuple[str, ...]
    reads_special: bool = False
    reads_reasoning: bool = False
    form: CallForm | None = None


# What opens a model's message in the prompts of the families that reason.
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


@dataclass(frozen=True)
class ReasoningParser:
    """Reasoning stands between two markers, at an answer's beginning. With `always` an answer
    begins within it, unless its prompt has closed it, even where the prompt has not opened it.

    `call`: where calls are read, this text ends reasoning too, and is the beginning of a call.
    `answer`: the markers around what follows the reasoning, where a family has some.
    `parse`: reads the whole answer, where reasoning is more than a beginning between two markers;
    such a family's calls are read by a tool parser with `reads_reasoning`, and by no other.
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

    def begun(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins within reasoning: what the prompt holds of the
        model's message opens it and does not close it."""
        found = [at + len(turn) for turn in _TURNS if (at := prompt.rfind(turn)) >= 0]
        if not found:
            end = prompt.rstrip()
            return end.endswith(self.begin) or (self.always and not end.endswith(self.end))
        message = prompt[max(found) :].lstrip()
        if message.startswith(self.begin):
            return self.end not in message
        return self.always and not message


class Reader:
    """One answer, as its text comes. `opened`: the prompt's end, which is read before it."""

    def __init__(self, pieces: Callable[[Source], Pieces], opened: str = "") -> None:
        self._opened = len(opened)
        self._source = Source()
        self._source.push(opened)
        self._pieces = pieces(self._source)

    def push(self, text: str) -> list[Piece]:
        """What `text` adds, as far as it can be told yet."""
        self._source.push(text)
        return self._read()

    def finish(self) -> list[Piece]:
        """No more text comes: what was held back."""
        self._source.ended = True
        return self._read()

    def reasoning_in(self, text: str) -> list[tuple[int, int]]:
        """Where reasoning begins and ends in the whole text of an answer, white space around it
        included. For a reader that has read nothing."""
        self._source.push(text)
        self._source.ended = True
        found: list[tuple[int, int]] = []
        for piece in self._pieces:
            if piece is None or piece.kind != "reasoning" or piece.text.isspace():
                continue  # white space alone stands between two messages, see gpt_oss
            end = self._source.place - self._opened
            start = len(text[:end].rstrip()) - len(piece.text.rstrip())
            found.append((len(text[:start].rstrip()), end))
        return found

    def _read(self) -> list[Piece]:
        found: list[Piece] = []
        texts: list[str] = []  # of the last piece
        for piece in self._pieces:
            if piece is None:
                break
            if not found or piece.kind == "call" or found[-1][::2] != piece[::2]:
                _join(found, texts)
                found.append(piece)
                texts = []
            texts.append(piece.text)
        else:
            if rest := self._source.take(len(self._source.unread)):
                _join(found, texts)
                return [*found, Piece("content", rest)]
        _join(found, texts)
        return found


def _join(found: list[Piece], texts: list[str]) -> None:
    """Give the last piece all its texts."""
    if len(texts) > 1:
        found[-1] = found[-1]._replace(text="".join(texts))


def as_pieces(
    kind: PieceKind, texts: Texts[Any], call: int = 0
) -> Generator[Piece | None, None, Any]:
    """The texts as pieces of one kind. Return what `texts` returns."""
    while True:
        try:
            text = next(texts)
        except StopIteration as stop:
            return stop.value
        yield None if text is None else Piece(kind, text, call)


def whole(texts: Texts[T]) -> Generator[None, None, tuple[str, T]]:
    """The texts at once, and what `texts` returns."""
    found: list[str] = []
    while True:
        try:
            text = next(texts)
        except StopIteration as stop:
            return "".join(found), stop.value
        if text is None:
            yield None
        else:
            found.append(text)


def content(source: Source, *markers: str) -> Generator[Piece | None, None, str | None]:
    """Read content up to one of `markers`, which is returned, without white space around it."""
    found: str | None = yield from as_pieces("content", source.until(*markers, trim=True))
    if found is not None:
        yield from source.skip_space()
    return found


def all_content(source: Source, tools: Tools) -> Pieces:
    """An answer without calls."""
    while not (yield from source.over()):
        yield Piece("content", source.take(len(source.unread)))
