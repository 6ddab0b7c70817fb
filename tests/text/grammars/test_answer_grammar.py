"""Grammars of whole answers: what they accept, and that parsers can read the accepted answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import jsonschema_rs
import pytest

from baton_text.artifacts import byte_artifacts
from baton_text.grammars.answer_grammar import CallRules, answer_grammar
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import Grammars
from baton_text.grammars.lark import Lark
from baton_text.grammars.matcher import Matcher
from baton_text.parsers.generic_json import GENERIC_JSON
from baton_text.parsers.glm45 import GLM45
from baton_text.parsers.gpt_oss import GPT_OSS, GPT_OSS_REASONING
from baton_text.parsers.hermes import HERMES
from baton_text.parsers.parser import CallForm, Piece, ReasoningParser, ToolParser, Tools
from baton_text.parsers.pythonic import PYTHONIC
from baton_text.parsers.qwen3_coder import QWEN3_CODER
from baton_text.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, enforced, reader
from baton_text.tokenizer import Tokenizer
from tests.text.token_markers import with_markers

TOKENIZERS: Mapping[str, Tokenizer] = {
    "bytes": Tokenizer.from_artifacts(byte_artifacts()),
    "markers": with_markers(),
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTE = {
    "properties": {
        "text": {"$ref": "#/$defs/line"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "urgent": {"type": "boolean"},
    },
    "required": ["text", "urgent"],
    "additionalProperties": False,
    "$defs": {"line": {"type": "string", "maxLength": 6}},
}
TOOLS: Tools = {"weather": WEATHER, "weather_note": NOTE, "now": {}}
PLACE = {
    "type": "object",
    "properties": {"nation": {"enum": ["no", "it"]}, "size": {"enum": [1, 20]}},
    "required": ["nation", "size"],
    "additionalProperties": False,
}
CONTENT = grammar_of("json", PLACE)
THINK = REASONING_PARSERS["qwen3"]
# Calls that begin as JSON does, one behind the other and in an array.
BARE = replace(
    HERMES,
    form=CallForm(
        before_name='{"name": "', before_arguments='", "parameters": ', after_arguments="}",
        between="; ",
    ),
)  # fmt: skip
LIST = replace(
    HERMES,
    form=CallForm(
        open="[", before_name='{"type": "function", "function": {"name": "',
        before_arguments='", "arguments": ', after_arguments="}}", between=", ", close="]",
    ),
)  # fmt: skip

# Markers of several tokens and text.
CHANNELS = ReasoningParser("channels", "<think>analysis[ARGS]", "</think><|im_start|>", marks=())

OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {"any": [1]}}\n</tool_call>'
BARE_OSLO = '{"name": "weather", "parameters": {"city": "Oslo"}}'
LIST_OSLO = '{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}'
ANSWER = '{"nation": "no", "size": 20}'


def calls(parser: ToolParser = HERMES, **rules: Any) -> CallRules:
    return CallRules(parser, TOOLS, **rules)


STRICT = frozenset({"weather"})
RULES: dict[str, dict[str, Any]] = {
    "required": {"calls": calls(required=True)},
    "one": {"calls": calls(required=True, parallel=False)},
    "named": {"calls": CallRules(HERMES, {"now": {}}, required=True, parallel=False)},
    "strict": {"calls": calls(strict=STRICT)},
    "strict, one": {"calls": calls(strict=STRICT, parallel=False)},
    "auto, one": {"calls": calls(parallel=False)},
    "auto or JSON": {"calls": calls(), "content": CONTENT},
    "auto or a choice": {"calls": calls(), "content": grammar_of("choice", ["yes", "<no>"])},
    "bare, required": {"calls": calls(BARE, required=True)},
    "bare, strict": {"calls": calls(BARE, strict=STRICT)},
    "bare or JSON": {"calls": calls(BARE, strict=STRICT), "content": CONTENT},
    "list, one": {"calls": calls(LIST, required=True, parallel=False)},
    "list, strict": {"calls": calls(LIST, strict=STRICT)},
    "list or JSON": {"calls": calls(LIST, strict=STRICT), "content": CONTENT},
    "thought, JSON": {"reasoning": THINK, "content": CONTENT},
    "thought, regex": {"reasoning": THINK, "content": grammar_of("regex", "[a-c]{2}")},
    "thought, choice": {"reasoning": THINK, "content": grammar_of("choice", ["yes", "no"])},
    "channels": {"reasoning": CHANNELS, "content": CONTENT},
    "thinking, JSON": {"reasoning": THINK, "content": CONTENT, "begun": True},
    "thinking, required": {"reasoning": THINK, "calls": calls(required=True), "begun": True},
    "thought, strict": {"reasoning": THINK, "calls": calls(strict=STRICT)},
    "XML, strict": {"calls": calls(QWEN3_CODER, strict=STRICT)},
    "keys, strict": {"calls": calls(GLM45, strict=STRICT)},
    "Python, strict": {"calls": calls(PYTHONIC, strict=STRICT)},
    "messages, JSON": {"reasoning": GPT_OSS_REASONING, "content": CONTENT},
    "messages, JSON, inside": {"reasoning": GPT_OSS_REASONING, "content": CONTENT, "inside": True},
    "messages, strict": {"reasoning": GPT_OSS_REASONING, "calls": calls(GPT_OSS, strict=STRICT)},
    "messages, strict, inside": {"calls": calls(GPT_OSS, strict=STRICT), "inside": True},
    "messages, required, inside": {"calls": calls(GPT_OSS, required=True), "inside": True},
    "messages or JSON": {
        "reasoning": GPT_OSS_REASONING,
        "calls": calls(GPT_OSS),
        "content": CONTENT,
    },
    "unknown, strict": {"calls": calls(GENERIC_JSON, strict=STRICT)},
    "granite, strict": {"calls": calls(TOOL_PARSERS["granite"], strict=STRICT)},
    "llama, strict": {"calls": calls(TOOL_PARSERS["llama3_json"], strict=STRICT)},
}
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
REMARK = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions."
MESSAGE_OSLO = f'{TO}weather <|constrain|>json<|message|>{{"city": "Oslo"}}'
XML_OSLO = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "</function>\n</tool_call>"
)
# How an answer goes on: it may end there, it may not, or what stands behind | may not follow.
End = Literal["complete", "open"]
ANSWERS: list[tuple[str, str, End]] = [
    ("required", OSLO, "complete"),
    ("required", f"{OSLO}\n{NOW}", "complete"),
    ("required", "|x", "open"),
    ("required", f"{OSLO}|{NOW}", "complete"),
    ("required", '<tool_call>\n{"name": "weather_|f', "open"),
    ("required", '<tool_call>\n{"name": "weather", "arguments": {|}', "open"),
    ("required", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"  |  }', "open"),
    ("one", f"{OSLO}|\n", "complete"),
    ("named", NOW, "complete"),
    ("named", '<tool_call>\n{"name": "|w', "open"),
    ("strict", "The weather: <b>sun</b>.\n", "complete"),
    ("strict", f"Let me see.\n{OSLO}\n{NOW} Done.", "complete"),
    ("strict", "Well: <tool_call>|x", "open"),
    ("strict", '<tool_call>\n{"name": "weather", "arguments": {|}', "open"),
    ("strict", OSLO.replace("weather", "weather_note"), "complete"),
    ("strict", "a <|im_start|> b", "complete"),
    ("strict, one", "No call.", "complete"),
    ("strict, one", f"One. {OSLO}|\n", "complete"),
    ("auto, one", f"One. {NOW}|\n", "complete"),
    ("auto or JSON", ANSWER, "complete"),
    ("auto or JSON", f"{OSLO}\n{NOW}", "complete"),
    ("auto or JSON", "|x", "open"),
    ("auto or JSON", f"{ANSWER}|<tool_call>", "complete"),
    ("auto or a choice", "<no>", "complete"),
    ("auto or a choice", OSLO, "complete"),
    ("bare, required", f"{BARE_OSLO}; {BARE_OSLO}", "complete"),
    ("bare, strict", f"It is {BARE_OSLO}", "complete"),
    ("bare, strict", BARE_OSLO, "complete"),
    ("bare, strict", '{"n|o', "open"),
    ("bare or JSON", ANSWER, "complete"),
    ("bare or JSON", f"{BARE_OSLO}; {BARE_OSLO}", "complete"),
    ("bare or JSON", '{"name": "weather", "parameters": {|}', "open"),
    ("bare or JSON", '{"name": "now", "parameters": {}}', "complete"),
    ("list, one", f"[{LIST_OSLO}]", "complete"),
    ("list, one", f"[{LIST_OSLO}|,", "open"),
    ("list, strict", f"[{LIST_OSLO}, {LIST_OSLO}]", "complete"),
    ("list, strict", "a [1]", "complete"),
    ("list, strict", "[|1", "open"),
    ("list or JSON", f"[{LIST_OSLO}, {LIST_OSLO}]", "complete"),
    ("list or JSON", ANSWER, "complete"),
    ("list or JSON", "[|]", "open"),
    ("thought, JSON", ANSWER, "complete"),
    ("thought, JSON", f"<think>{ANSWER}</think>\n\n{ANSWER}", "complete"),
    ("thought, JSON", f"<think>{ANSWER}", "open"),
    ("thought, JSON", "<think></think>\n\n\n\n|\n", "open"),
    ("thought, regex", "<think>?</think>\nab|c", "complete"),
    ("thought, choice", "<think>?</think>\nyes", "complete"),
    ("thinking, JSON", f"{ANSWER}", "open"),
    ("thinking, JSON", f"{ANSWER}</think>{ANSWER}", "complete"),
    ("thinking, required", f"A call?\n</think>\n\n{OSLO}", "complete"),
    ("thinking, required", "A call?\n</think>\n\n|N", "open"),
    ("thought, strict", f"<think>Try <tool_call.</think>\n{OSLO}", "complete"),
    ("thought, JSON", "<think>A <tool_call>", "open"),
    ("channels", '<think>analysis[ARGS]A.</think><|im_start|>{"nation": "no"', "open"),
    ("channels", "<think>|final", "open"),
    ("thought, strict", "<think>Try.</think>\nSo <tool_call>|.", "open"),
    ("thought, strict", f"So {OSLO}.", "complete"),
    ("XML, strict", f"So:\n{XML_OSLO}\n{XML_OSLO} Done.", "complete"),
    ("XML, strict", XML_OSLO.removeprefix("<tool_call>\n"), "complete"),
    ("XML, strict", "<tool_call>\n<function=weather>\n|x", "open"),
    ("XML, strict", "<function=weather>\n<parameter=city>\nO|x", "open"),
    ("XML, strict", f"{XML_OSLO[:-24]}<parameter=days>\n9|a", "open"),
    ("XML, strict", "<function=weather_note>\n<parameter=x>\na\nb\n</parameter>\n</", "open"),
    ("XML, strict", "a < b, <function> and <parameter=x>", "complete"),
    ("keys, strict", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>|P", "open"),
    (
        "keys, strict",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        "complete",
    ),
    ("keys, strict", "<tool_call>now\n</tool_call>", "complete"),
    ("Python, strict", '[weather(city="Oslo", days=3), now(a=[1], b={"c": null})]', "complete"),
    ("Python, strict", "[weather(|)", "open"),
    ("Python, strict", '[weather(city="Oslo", |c', "open"),
    ("Python, strict", "It is [weather()].", "complete"),
    ("messages, JSON", f"{FINAL}{ANSWER}", "complete"),
    ("messages, JSON", f"{ANALYSIS}{FINAL}{ANSWER}", "complete"),
    ("messages, JSON", f"{ANALYSIS}|{{", "open"),
    ("messages, JSON", f"{ANALYSIS}<|channel|>f", "open"),
    ("messages, JSON, inside", ANSWER, "complete"),
    ("messages, strict", f"{ANALYSIS}{MESSAGE_OSLO}", "complete"),
    ("messages, strict", f"{ANALYSIS}{REMARK}{MESSAGE_OSLO}", "complete"),
    ("messages, strict", f"{REMARK}{FINAL}It is sunny.", "complete"),
    ("messages, strict", f"{TO}weather <|constrain|>json<|message|>{{|}}", "open"),
    ("messages, strict", f"{TO}now <|constrain|>json<|message|>{{}}", "complete"),
    ("messages, strict", "|a", "open"),
    ("messages, strict, inside", " is sunny.", "complete"),
    ("messages, strict, inside", f" I look.<|end|><|start|>assistant{MESSAGE_OSLO}", "complete"),
    ("messages, required, inside", f"<|end|><|start|>assistant{MESSAGE_OSLO}", "complete"),
    ("messages or JSON", f"{ANALYSIS}{MESSAGE_OSLO}", "complete"),
    ("messages or JSON", f"{ANALYSIS}{FINAL}{ANSWER}", "complete"),
    ("messages or JSON", f"{FINAL}|a", "open"),
    ("unknown, strict", "It is [1] or {}.", "complete"),
    ("unknown, strict", "`a`, ```b```", "complete"),
    ("unknown, strict", "```python\n[]```", "complete"),
    ("unknown, strict", "|{", "complete"),
    ("unknown, strict", "```|[", "open"),
    ("unknown, strict", "```j|s", "open"),
    ("granite, strict", '<tool_call>[{"name": "weather", "arguments": {|}', "open"),
    ("llama, strict", "a <|python_tag b", "complete"),
    ("llama, strict", f"{BARE_OSLO}; {BARE_OSLO}", "complete"),
]  # fmt: skip


@lru_cache
def grammars(tokenizer: str) -> Grammars:
    return Grammars(TOKENIZERS[tokenizer])


def matcher_of(tokenizer: str, **rules: Any) -> Matcher:
    grammar = answer_grammar(TOKENIZERS[tokenizer], **rules)
    assert grammar is not None
    grammars(tokenizer).check(grammar)
    return grammars(tokenizer).matcher(grammar)


def ids_of(tokenizer: str, text: str) -> list[int]:
    return TOKENIZERS[tokenizer].encode(text, add_special_tokens=False)


def allowed(matcher: Matcher) -> frozenset[int]:
    return ids_in(matcher.mask())


@lru_cache(maxsize=10_000)  # random answers come to the same masks again and again
def ids_in(mask: bytes) -> frozenset[int]:
    return frozenset(id for id in range(8 * len(mask)) if mask[id // 8] >> id % 8 & 1)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(("rules", "text", "end"), ANSWERS)
def test_an_answer_is_accepted_until_it_breaks_its_rules(
    tokenizer: str, rules: str, text: str, end: End
) -> None:
    matcher = matcher_of(tokenizer, **RULES[rules])
    good, refused = text, ""
    if bar := re.search(r"(?<!<)\|(?!>)", text):
        good, refused = text[: bar.start()], text[bar.end() :]
    ids = ids_of(tokenizer, good)
    for place, token in enumerate(ids):
        assert token in allowed(matcher), good[:place]
        assert matcher.accept([token])
    assert matcher.complete == (end == "complete")
    if refused:
        [token, *_] = ids_of(tokenizer, refused)
        assert token not in allowed(matcher)
        assert matcher.count_accepted([token]) == 0


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"reasoning": THINK},
        {"reasoning": THINK, "begun": True},
        {"calls": calls()},
        {"calls": calls(replace(HERMES, form=None), parallel=False), "reasoning": THINK},
    ],
)
def test_without_constraints_there_is_no_grammar(rules: dict[str, Any]) -> None:
    assert answer_grammar(TOKENIZERS["markers"], **rules) is None


BIG = {"type": "object", "properties": {"a": {"not": {}}}}


@pytest.mark.parametrize(
    ("tokenizer", "rules", "message"),
    [
        (
            "bytes",
            {"calls": CallRules(HERMES, {"f": BIG}, required=True)},
            "^f: properties.a: `not` cannot be enforced",
        ),
        ("bytes", {"calls": CallRules(HERMES, {"f": {"type": "array"}}, required=True)}, "^f: arg"),
        ("bytes", {"calls": calls(replace(HERMES, form=None), required=True)}, "'hermes' cannot"),
        ("bytes", {"calls": calls(replace(HERMES, form=None)), "content": CONTENT}, "'hermes'"),
        ("bytes", {"reasoning": THINK, "budget": 5}, "not '<think>' and '</think>'"),
        ("markers", {"reasoning": CHANNELS, "budget": 5}, "a model whose markers are tokens"),
        ("markers", {"budget": 5}, "needs a reasoning parser"),
    ],
)
def test_the_error_says_why_rules_cannot_be_enforced(
    tokenizer: str, rules: dict[str, Any], message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        answer_grammar(TOKENIZERS[tokenizer], **rules)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_marker_spelled_as_text_starts_no_call_of_llama(tokenizer: str) -> None:
    matcher = matcher_of(tokenizer, calls=calls(TOOL_PARSERS["llama3_json"], strict=STRICT))
    assert matcher.accept(b"a <|python_tag|")
    assert matcher.count_accepted(b">") == 0


def test_an_unsupported_schema_is_accepted_if_it_is_not_enforced() -> None:
    rules = CallRules(HERMES, {"f": BIG, "weather": WEATHER}, strict=STRICT)
    matcher = matcher_of("bytes", calls=rules)
    assert matcher.accept(OSLO.replace("weather", "f").encode())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("content", [None, CONTENT])
@pytest.mark.parametrize("budget", [0, 1, 7, 20_000])
def test_reasoning_ends_at_its_budget(begun: bool, content: str | None, budget: int) -> None:
    matcher = matcher_of("markers", reasoning=THINK, begun=begun, content=content, budget=budget)
    [end] = ids_of("markers", "</think>")
    assert begun or matcher.accept(ids_of("markers", "<think>"))
    assert matcher.accept((ids_of("markers", "a\n[TOOL_CALLS]<tool_call>") * budget)[:budget])
    assert allowed(matcher) == {end}
    assert matcher.accept([end])
    assert matcher.accept(ids_of("markers", f"\n\n{ANSWER}"))
    assert matcher.complete
    assert content or matcher.accept(ids_of("markers", "a</think>[TOOL_CALLS]"))


def test_reasoning_may_end_before_its_budget_and_need_not_begin() -> None:
    rules = {"reasoning": THINK, "content": CONTENT, "budget": 9}
    assert matcher_of("markers", **rules).accept(ids_of("markers", f"<think>a</think>{ANSWER}"))
    assert matcher_of("markers", **rules).accept(ids_of("markers", ANSWER))


@pytest.mark.parametrize("kind", ["choice", "json"])
def test_text_that_spells_a_token_can_be_generated(kind: Literal["choice", "json"]) -> None:
    """The mask is not empty, although the tokenizer would encode the text to the token."""
    text = "a<think>b[TOOL_CALLS]"
    value = [text] if kind == "choice" else {"const": text}
    matcher = grammars("markers").matcher(grammar_of(kind, value))
    written = b""
    while not matcher.stopped:
        [token] = allowed(matcher)
        assert matcher.accept([token])
        written += TOKENIZERS["markers"].token_bytes(token)
    assert written.decode() in (text, json.dumps(text))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("rules", [{"strict": STRICT}, {"required": True}])
def test_no_call_begins_within_reasoning(tokenizer: str, rules: dict[str, Any]) -> None:
    """Some parsers end reasoning at a call."""
    matcher = matcher_of(tokenizer, calls=calls(**rules), reasoning=THINK, begun=True)
    ids = ids_of(tokenizer, "Try <tool_call>")
    assert matcher.count_accepted(ids) == len(ids) - 1
    assert matcher.accept(ids_of(tokenizer, f"Try <tool_call.</think>\n\n{OSLO}"))


TAG = {
    "structures": [
        {"begin": "<tool_call>", "schema": PLACE, "end": "</tool_call>"},
        {"begin": "<tool_call>x<think>", "schema": WEATHER},
        {"begin": "[TOOL_CALLS]", "schema": WEATHER, "end": "<|im_start|>"},
        {"begin": "<call>", "schema": WEATHER, "end": "</call>"},
    ],
    "triggers": ["<tool", "[TOOL_CALLS]", "<call>"],
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (f"a<tool_call>{ANSWER}</tool_call>b<tool_call>", "y"),
        ('<tool_call>x<think>{"city": "Rome"}c', ""),
        ("[TOOL_CALLS]{", "}"),
        ('[TOOL_CALLS]{"city": "Rome"}', "x"),
        ('<call>{"city": "Rome"}</call> [', ""),
    ],
)
def test_a_structural_tag_begins_with_the_models_own_tokens(
    tokenizer: str, text: str, refused: str
) -> None:
    grammar = grammar_of("structural_tag", TAG, TOKENIZERS[tokenizer])
    matcher = grammars(tokenizer).matcher(grammar)
    assert matcher.accept(ids_of(tokenizer, text))
    assert not refused or matcher.count_accepted(ids_of(tokenizer, refused)) == 0


def test_a_structural_tags_trigger_must_not_have_a_token_after_text() -> None:
    tag = {"structures": [{"begin": "x<think>"}], "triggers": ["x<think>"]}
    with pytest.raises(GrammarError, match="after text"):
        grammar_of("structural_tag", tag, TOKENIZERS["markers"])


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_lark_tokens_are_the_tokens_that_no_text_matches(tokenizer: str) -> None:
    one = TOKENIZERS[tokenizer]
    text = grammars(tokenizer).matcher(grammar_of("regex", "(?s:.+)"))
    lark = Lark(one)
    for added, token in one.added_tokens.items():
        assert lark.is_token(added) == (text.count_accepted([token]) == 0)


# Random answers ------------------------------------------------------------------------------


def walk(
    tokenizer: str, grammar: str, hints: list[str], seed: int, start: str = "", most: int = 600
) -> list[int]:
    """An answer that follows the masks at random, from its first token up to an end; `start` and
    `hints` are texts that it tries to write. A new matcher says the same as the one that walked:
    at the beginning often, then at distances that grow as its work does."""
    choose = random.Random(seed)
    eos = set(TOKENIZERS[tokenizer].eos_ids)
    closing = set(b'"}]')
    matcher, ids = grammars(tokenizer).matcher(grammar), list[int]()
    planned, next_look = ids_of(tokenizer, start), 0
    for place in range(most):
        may = allowed(matcher)
        assert may, matcher.error
        if place == next_look:
            next_look += 5 + place // 8
            again = grammars(tokenizer).matcher(grammar)
            assert again.accept(ids)
            assert again.mask() == matcher.mask()
            assert again.complete == matcher.complete
        if not planned and hints and choose.random() < 0.3:
            planned = ids_of(tokenizer, choose.choice(hints))
        if may <= eos or (may & eos and not planned and choose.random() < 0.2):
            return ids
        ended = may & closing
        if planned and planned[0] in may:
            token = planned.pop(0)
        elif ended and choose.random() < 0.5:
            token = choose.choice(sorted(ended))
        else:
            planned = []
            token = choose.choice(sorted(may - eos))
        assert matcher.count_accepted([token]) == 1
        assert matcher.accept([token])
        ids.append(token)
    return ids if matcher.complete else []


def read(
    tokenizer: str, ids: list[int], parser: ToolParser, reasoning: ReasoningParser | None,
    begun: bool, tools: Tools,
) -> tuple[str, list[tuple[str, str]]]:  # fmt: skip
    """The content and calls that a client receives."""
    special = parser.reads_special or bool(reasoning and reasoning.reads_special)
    text = TOKENIZERS[tokenizer].decode(ids, skip_special_tokens=not special)
    one = reader(tools, parser, reasoning, begun=begun)
    pieces: Iterator[Piece] = iter([*one.push(text), *one.finish()])
    content, found = "", list[tuple[str, str]]()
    for piece in pieces:
        if piece.kind == "call":
            found.append((piece.text, ""))
        elif piece.kind == "arguments":
            name, arguments = found[piece.call]
            found[piece.call] = name, arguments + piece.text
        elif piece.kind == "content":
            content += piece.text
    return content, found


WALKS: dict[str, dict[str, Any]] = {
    "required": {"required": True},
    "one": {"required": True, "parallel": False},
    "strict": {"strict": STRICT},
    "strict, one": {"strict": STRICT, "parallel": False},
    "or JSON": {"content": CONTENT, "strict": STRICT},
    "thinking, required": {"required": True, "reasoning": THINK, "begun": True},
    "thought, strict": {"strict": STRICT, "reasoning": THINK},
}
VALUES = ("Oslo", "\n</parameter>\n", "</arg_value>\n", "</function>", "</tool_call>", "true")
ENFORCED = {name: parser for name, parser in TOOL_PARSERS.items() if parser.form is not None}
# Families whose arguments are not one JSON object have a walk of their own.
WALKED = [
    *((walks, name) for walks in WALKS for name in ENFORCED),
    *(
        ("all strict", name)
        for name, parser in ENFORCED.items()
        if parser.form and parser.form.arguments
    ),
]
WALKS["all strict"] = {"strict": frozenset(TOOLS)}


def with_each_tokenizer() -> list[Any]:
    """Each walk with each tokenizer, of which `make test` takes one, in turn."""
    return [
        pytest.param(*walk, tokenizer, marks=[] if turn == number % 2 else [pytest.mark.long])
        for number, walk in enumerate(WALKED)
        for turn, tokenizer in enumerate(TOKENIZERS)
    ]


@pytest.mark.parametrize(("walks", "name", "tokenizer"), with_each_tokenizer())
def test_random_answers_within_the_masks_are_read_as_calls_that_match(
    walks: str, name: str, tokenizer: str
) -> None:
    parser, rules = ENFORCED[name], dict(WALKS[walks])
    content, reasoning = rules.pop("content", None), rules.pop("reasoning", None)
    begun = rules.pop("begun", False)
    if content is not None:
        parser = enforced(parser)
    if parser.messages is not None and reasoning is not None:
        reasoning = GPT_OSS_REASONING
    grammar = answer_grammar(
        TOKENIZERS[tokenizer], content=content, calls=CallRules(parser, TOOLS, **rules),
        reasoning=reasoning, begun=begun,
    )  # fmt: skip
    assert grammar is not None
    form = parser.form
    assert form is not None
    head = form.open + form.before_name
    hints = [head, '{"city": "Rome"}', '{"nation": "it"', "{}"]
    starts = [""]
    if form.arguments is not None:
        hints += VALUES
    if not rules.get("required"):
        starts = ["", f"{head}weather{form.before_arguments}"]
        # Other ways to begin a call, with arguments that may not match.
        hints += [f"{text}{follows}weather{form.before_arguments}" for text, follows in form.also]
    hints += [reasoning.end] * 3 if reasoning else []
    done, with_calls = 0, 0
    for seed in range(12):
        if done == 8 and with_calls:
            break
        ids = walk(tokenizer, grammar, hints, seed, starts[seed % len(starts)])
        if not ids:
            continue
        text, found = read(tokenizer, ids, parser, reasoning, begun, TOOLS)
        done, with_calls = done + 1, with_calls + bool(found)
        for function, arguments in found:
            value = json.loads(arguments)
            assert isinstance(value, dict)
            if rules.get("required") or function in rules.get("strict", ()):
                jsonschema_rs.validate(dict(TOOLS[function]), value)
            assert function in TOOLS
        if rules.get("required"):
            assert found
            assert not text.strip()
        if rules.get("parallel") is False:
            assert len(found) <= 1
        if content and not found:
            jsonschema_rs.validate(PLACE, json.loads(text))
    assert done >= 6
    assert with_calls
