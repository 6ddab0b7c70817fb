"""Structured output on random weights, with bounded schemas and required tool calls: nearly all
outputs finish by stop, and these match."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import jsonschema_rs
import pytest

from baton_engine import LLM, SamplingParams, StructuredOutputsParams
from baton_engine.llm import CompletionOutput
from baton_protocol.sampling import StructuredOutput
from baton_text.artifacts import byte_artifacts, read_artifacts
from baton_text.grammars.answer_grammar import CallRules, answer_grammar
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import Grammars
from baton_text.parsers.parser import Piece
from baton_text.parsers.registry import TOOL_PARSERS, reader
from baton_text.tokenizer import Tokenizer
from tests.support.clients.http import Json
from tests.support.engines.random_schemas import one_of_each_key, random_schema
from tests.support.faults.structures import SCHEMAS, TOOLS

MODEL = "llama-gqa4"
CHOICES = 5  # outputs for each prompt
MOST_TOKENS = 400
LEAST_SHARE = 0.9  # of the outputs that must finish by stop
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
BYTES = Tokenizer.from_artifacts(byte_artifacts())
BOUNDED = {**SCHEMAS, **MORE_SCHEMAS}
CALL_PARSERS = [name for name, parser in TOOL_PARSERS.items() if parser.form is not None]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path]) -> LLM:
    return LLM(tiny_model(MODEL), dtype="float32", threads=1, kv_blocks=2000)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_artifacts(read_artifacts(tiny_model(MODEL)))


def finished_outputs(
    llm: LLM, grammars: Mapping[str, StructuredOutput], least_share: float
) -> list[tuple[str, CompletionOutput]]:
    """The outputs that finish by stop, as (name of the grammar, output)."""
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, n=CHOICES, max_tokens=MOST_TOKENS, structured=grammar,
            skip_special_tokens=False,
        )
        for seed, grammar in enumerate(grammars.values())
    ]  # fmt: skip
    outputs = llm.generate([f"{name}: " for name in grammars], params)
    by_name = list(zip(grammars, outputs, strict=True))
    outputs_by_name = [(name, choice) for name, output in by_name for choice in output.outputs]
    finished = [
        (name, choice) for name, choice in outputs_by_name if choice.finish_reason == "stop"
    ]
    unfinished = [name for name, choice in outputs_by_name if choice.finish_reason != "stop"]
    assert len(finished) >= least_share * len(outputs_by_name), f"these do not finish: {unfinished}"
    return finished


def test_outputs_of_bounded_schemas_finish_and_match(llm: LLM) -> None:
    grammars = {name: StructuredOutputsParams(json=schema) for name, schema in BOUNDED.items()}
    assert len(grammars) == 30
    for name, choice in finished_outputs(llm, grammars, LEAST_SHARE):
        jsonschema_rs.validate(BOUNDED[name], json.loads(choice.text), validate_formats=True)


def test_outputs_of_random_schemas_match_and_have_no_key_twice(llm: LLM) -> None:
    schemas: dict[str, Json] = {}
    for seed in range(24):
        schema = random_schema(random.Random(seed))
        with suppress(GrammarError):
            Grammars(BYTES).check(grammar_of("json", schema))
            schemas[str(seed)] = schema
    grammars = {name: StructuredOutputsParams(json=schema) for name, schema in schemas.items()}
    assert len(grammars) >= 10
    for name, choice in finished_outputs(llm, grammars, 0.5):
        value = json.loads(choice.text, object_pairs_hook=one_of_each_key)
        jsonschema_rs.validate(schemas[name], value, validate_formats=True)


@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_finish_and_their_parsed_arguments_match(
    llm: LLM, tokenizer: Tokenizer, parallel: bool
) -> None:
    grammars: dict[str, StructuredOutput] = {}
    for name in CALL_PARSERS:
        rules = CallRules(TOOL_PARSERS[name], TOOLS, required=True, parallel=parallel)
        grammar = answer_grammar(tokenizer, calls=rules)
        assert grammar is not None
        grammars[name] = StructuredOutput(grammar)
    # The number of parallel calls is unbounded, so fewer outputs finish.
    for name, choice in finished_outputs(llm, grammars, 0.5 if parallel else LEAST_SHARE):
        calls = calls_of(name, choice.text)
        assert len(calls) >= 1 if parallel else len(calls) == 1
        for function, arguments in calls:
            jsonschema_rs.validate(dict(TOOLS[function]), json.loads(arguments))


def calls_of(parser: str, text: str) -> list[tuple[str, str]]:
    """The (function, arguments) of each call. The output must contain nothing else."""
    parser_reader = reader(TOOLS, TOOL_PARSERS[parser])
    calls: list[tuple[str, str]] = []
    pieces: list[Piece] = [*parser_reader.push(text), *parser_reader.finish()]
    for piece in pieces:
        if piece.kind == "call":
            calls.append((piece.text, ""))
        else:
            assert piece.kind == "arguments", text
            calls[piece.call] = calls[piece.call][0], calls[piece.call][1] + piece.text
    return calls
