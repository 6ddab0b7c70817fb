"""Calls in Python syntax with literals as arguments:

    pythonic    Llama 3.2 and 4: the answer is [weather(city="Paris", days=2), now()], optionally
                between <|python_start|> and <|python_end|>
    olmo3       OLMo 3: one call per line between <function_calls> and </function_calls>

Only a complete call can be converted to JSON, so calls do not stream.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Generator
from typing import Any

from baton_text.parsers.parser import (
    ArgumentForm,
    CallForm,
    Piece,
    Pieces,
    ToolParser,
    Tools,
    content,
    listed_calls,
)
from baton_text.parsers.source import Source

START, END = "<|python_start|>", "<|python_end|>"
OLMO_START, OLMO_END = "<function_calls>", "</function_calls>"
MAX_NAME = 256  # characters
MAX_CALL = 64 << 10  # characters of arguments
MAX_DEPTH = 64  # of brackets
_NAME = re.compile(r"[\w.\-]+")
_OUTSIDE = re.compile(r"""[^"'()\[\]{}]+""")  # text outside of a string
_INSIDE = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_NAMES = {"true": True, "false": False, "null": None}
_STRING_OR_KEYWORD = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')|(?P<keyword>\b[^\W\d]\w*+)(?=\s*=)""",
    re.DOTALL,
)
# A grammar writes no escapes in JSON strings that Python reads in another way.
_KEYWORD_ARGUMENTS = ArgumentForm(before_key="", after_key="=", between=", ", key=r"[^\W\d]\w*")


def _parse(source: Source, tools: Tools) -> Pieces:
    def call(number: int, before: str) -> Generator[Piece | None, None, bool]:
        return _call(source, number, tools, before)

    calls = 0
    before = yield from source.skip_space()
    if (yield from source.starts_with(START)):
        before = yield from source.skip_space()
    while True:
        if (yield from source.starts_with("[")):
            calls = yield from listed_calls(source, calls, before, call)
        elif before:
            yield Piece("content", before)
        before = ""
        while (marker := (yield from content(source, START, END))) == END:
            pass
        if marker is None:
            return


def _parse_olmo3(source: Source, tools: Tools) -> Pieces:
    calls = 0
    while (marker := (yield from content(source, OLMO_START, OLMO_END))) is not None:
        if marker == OLMO_START:
            while (yield from _call(source, calls, tools)):
                calls += 1
                yield from source.skip_space()


def _call(
    source: Source, number: int, tools: Tools, before: str = ""
) -> Generator[Piece | None, None, bool]:
    """Read one call; return whether it is one. If not, yield `before` and the text read so far as
    content."""
    name = ""
    while len(name) <= MAX_NAME and not (yield from source.over()) and (run := source.run(_NAME)):
        name += run
    read = [before, name]
    arguments = None
    if name in tools and (yield from source.starts_with("(")):
        read.append("(")
        if (yield from _bracketed(source, read)):
            arguments = _arguments("".join(read[2:]))
    if arguments is not None:
        yield Piece("call", name, number)
        yield Piece("arguments", arguments, number)
    elif text := "".join(read):
        yield Piece("content", text)
    return arguments is not None


def _bracketed(source: Source, read: list[str]) -> Generator[None, None, bool]:
    """Append text to `read` up to the bracket that closes the one just read.

    Return False if the text ends first or exceeds MAX_CALL or MAX_DEPTH."""
    depth, length, quote = 1, 0, ""
    while depth and not (yield from source.over()):
        text = source.run(_INSIDE[quote] if quote else _OUTSIDE)
        if not text:
            text = source.take(1)
            if quote:
                if text == "\\" and not (yield from source.over()):
                    text += source.take(1)
                elif text == quote:
                    quote = ""
            elif text in "\"'":
                quote = text
            else:
                depth += 1 if text in "([{" else -1
        read.append(text)
        length += len(text)
        if length > MAX_CALL or depth > MAX_DEPTH:
            return False
    return not depth


def _arguments(text: str) -> str | None:
    """Convert a call's arguments, given with their brackets, to a JSON object.

    None unless each is a literal passed by keyword."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escapes
            call = ast.parse("f" + _STRING_OR_KEYWORD.sub(_as_python, text), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {
            keyword.arg[1:]: _value(keyword.value) for keyword in call.keywords if keyword.arg
        }
        if len(values) < len(call.keywords):
            return None
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return arguments


def _as_python(match: re.Match[str]) -> str:
    """Make a match valid Python: strings may span lines, arguments may be named like keywords."""
    if match["string"]:
        return match["string"].replace("\r", "\\r").replace("\n", "\\n")
    return "_" + match["keyword"]


def _value(node: ast.expr) -> Any:
    """The value of a literal. Raise ValueError for a node that JSON cannot express."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a key is not a string")
            return dict(zip(names, map(_value, values), strict=True))
        case _:
            raise ValueError(f"{type(node).__name__} is not a literal")


PYTHONIC = ToolParser(
    name="pythonic",
    parse=_parse,
    marks=("[func_name1(",),
    reads_special=True,
    form=CallForm(
        open="[",
        before_name="",
        before_arguments="(",
        after_arguments=")",
        between=", ",
        close="]",
        arguments=_KEYWORD_ARGUMENTS,
        also=((START, "["),),
    ),
)
OLMO3 = ToolParser(
    name="olmo3",
    parse=_parse_olmo3,
    marks=(OLMO_START, OLMO_END),
    reads_special=True,
    form=CallForm(
        open=f"{OLMO_START}\n",
        before_name="",
        before_arguments="(",
        after_arguments=")",
        between="\n",
        close=f"\n{OLMO_END}",
        arguments=_KEYWORD_ARGUMENTS,
    ),
)
