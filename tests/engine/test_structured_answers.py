"""Bounded schemas and required calls on random weights: nearly all answers end by themselves, and
those match."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jsonschema_rs
import pytest

from baton_engine import LLM, SamplingParams, StructuredOutputsParams
from baton_engine.llm import CompletionOutput
from baton_protocol.sampling import StructuredOutput
from baton_text.answer_grammar import CallRules, answer_grammar
from baton_text.artifacts import read_artifacts
from baton_text.parsers.parser import Piece
from baton_text.parsers.registry import TOOL_PARSERS, reader
from baton_text.tokenizer import Tokenizer
from tests.support.clients.http import Json
from tests.support.faults.structures import SCHEMAS, TOOLS

MODEL = "llama-gqa4"
CHOICES = 5  # answers to each prompt
MOST_TOKENS = 400
LEAST_SHARE = 0.9
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SHORT = {"type": "string", "maxLength": 4}
TEXT = {"type": "string", "maxLength": 40}
MORE_SCHEMAS: Mapping[str, Json] = {
    "boolean": {"type": "boolean"},
    "null or digit": {"anyOf": [{"type": "null"}, DIGIT]},
    "whole number": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "text": TEXT,
    "empty array": {"type": "array", "maxItems": 0},
    "texts": {"type": "array", "items": TEXT, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [DIGIT, SHORT, {"type": "null"}], "items": False},
    "time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "open object": {"properties": {"a": DIGIT}, "required": ["a"], "type": "object",
                    "maxProperties": 1},
    "map": {"type": "object", "additionalProperties": DIGIT, "required": ["x", "y"],
            "maxProperties": 2},
    "one of two": {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "value": value},
         "required": ["kind", "value"], "additionalProperties": False}
        for kind, value in (("text", SHORT), ("digit", DIGIT))
    ]},
}  # fmt: skip
BOUNDED = {**SCHEMAS, **MORE_SCHEMAS}
CALLING = [name for name, parser in TOOL_PARSERS.items() if parser.form is not None]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path]) -> LLM:
    return LLM(tiny_model(MODEL), dtype="float32", threads=1, kv_blocks=2000)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_artifacts(read_artifacts(tiny_model(MODEL)))


def ended(
    llm: LLM, grammars: Mapping[str, StructuredOutput], least_share: float
) -> list[tuple[str, CompletionOutput]]:
    """The answers that end by stop, each with its grammar's name."""
    asked = [
        SamplingParams(
            temperature=1.0, seed=seed, n=CHOICES, max_tokens=MOST_TOKENS, structured=grammar,
            skip_special_tokens=False,
        )
        for seed, grammar in enumerate(grammars.values())
    ]  # fmt: skip
    outputs = llm.generate([f"{name}: " for name in grammars], asked)
    named = list(zip(grammars, outputs, strict=True))
    answers = [(name, choice) for name, output in named for choice in output.outputs]
    found = [(name, choice) for name, choice in answers if choice.finish_reason == "stop"]
    cut = [name for name, choice in answers if choice.finish_reason != "stop"]
    assert len(found) >= least_share * len(answers), f"these do not end: {cut}"
    return found


def test_answers_under_bounded_schemas_end_and_match(llm: LLM) -> None:
    grammars = {name: StructuredOutputsParams(json=schema) for name, schema in BOUNDED.items()}
    assert len(grammars) == 30
    for name, choice in ended(llm, grammars, LEAST_SHARE):
        # Formats are notes to the validator, as drafts since 2019-09 have it: a grammar lets
        # through February 29 of any year, and second 60 of any minute.
        jsonschema_rs.validate(BOUNDED[name], json.loads(choice.text))


@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_end_and_their_parser_reads_arguments_that_match(
    llm: LLM, tokenizer: Tokenizer, parallel: bool
) -> None:
    grammars: dict[str, StructuredOutput] = {}
    for name in CALLING:
        rules = CallRules(TOOL_PARSERS[name], TOOLS, required=True, parallel=parallel)
        grammar = answer_grammar(tokenizer, calls=rules)
        assert grammar is not None
        grammars[name] = StructuredOutput(grammar)
    # How many calls there may be has no bound.
    for name, choice in ended(llm, grammars, 0.5 if parallel else LEAST_SHARE):
        calls = calls_of(name, choice.text)
        assert len(calls) >= 1 if parallel else len(calls) == 1
        for function, arguments in calls:
            jsonschema_rs.validate(dict(TOOLS[function]), json.loads(arguments))


def calls_of(parser: str, text: str) -> list[tuple[str, str]]:
    """Functions and arguments; there is nothing else in the answer."""
    one = reader(TOOLS, TOOL_PARSERS[parser])
    calls: list[tuple[str, str]] = []
    pieces: list[Piece] = [*one.push(text), *one.finish()]
    for piece in pieces:
        if piece.kind == "call":
            calls.append((piece.text, ""))
        else:
            assert piece.kind == "arguments", text
            calls[piece.call] = calls[piece.call][0], calls[piece.call][1] + piece.text
    return calls
