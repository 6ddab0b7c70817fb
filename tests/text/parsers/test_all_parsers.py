"""Properties of every parser in the registry, for any text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton_text.parsers.generic_json import GENERIC_JSON
from baton_text.parsers.parser import CallForm, ReasoningParser, ToolParser
from baton_text.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    enforced,
    tool_parser_for,
)
from tests.text.parsers.reading import TOOLS, read

WITH_JSON = [name for name, parser in TOOL_PARSERS.items() if enforced(parser) is parser]
FRAGMENTS = (
    '{"name": "weather", "arguments": {"city": "Paris"}}',
    '{"name": "now", "parameters": {}}',
    "weather(city='Paris')",
    '"name"',
    '"arguments": ',
    "weather",
    "now",
    "{}",
    *"{}[]()<>\"\\':,;=|`\n -1",
    "\u00e9\U0001f600",
    "true",
)
_MARKER = re.compile(r"</?[^\s<>]+>|\[/?[A-Z_]+\]")
# Few examples, because each is read with hundreds of splits.
SETTINGS = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# JSON objects as a model writes them; a marker within one of its strings belongs to it.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def markers(parser: ToolParser) -> list[str]:
    """The family's markers that its marks and its form contain."""
    form = parser.form
    texts = [*parser.marks]
    if form is not None:
        texts += form.open, form.before_name, form.before_arguments, form.after_arguments
        texts += form.between or "", form.close
    return sorted({found for text in texts for found in _MARKER.findall(text)})


def values(own: list[str]) -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers(-99, 99) | TEXTS | st.sampled_from(["", *own])
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
        max_leaves=4,
    )


def rendered(form: CallForm, calls: list[tuple[str, str]]) -> str:
    inner = (form.between or "").join(
        f"{form.before_name}{name}{form.before_arguments}{arguments}{form.after_arguments}"
        for name, arguments in calls
    )
    return f"{form.open}{inner}{form.close}"


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_the_split_into_deltas_does_not_change_how_text_is_read(name: str) -> None:
    parser = TOOL_PARSERS[name]
    pieces = st.sampled_from([*FRAGMENTS, *markers(parser)]) | st.text(max_size=4)

    @SETTINGS
    @given(st.lists(pieces, max_size=12).map("".join))
    def check(text: str) -> None:
        read(text, parser)

    check()


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_the_split_into_deltas_does_not_change_how_reasoning_is_read(name: str) -> None:
    parser: ReasoningParser = REASONING_PARSERS[name]
    pieces = st.sampled_from([parser.begin, parser.end, *FRAGMENTS]) | st.text(max_size=4)

    @SETTINGS
    @given(st.lists(pieces, max_size=10).map("".join), st.booleans())
    def check(text: str, begun: bool) -> None:
        read(text, TOOL_PARSERS["hermes"], parser, begun=begun)

    check()


@pytest.mark.parametrize("name", WITH_JSON)
def test_an_answer_in_the_familys_form_is_read_back(name: str) -> None:
    parser = TOOL_PARSERS[name]
    form = parser.form
    assert form is not None
    most = 1 if form.between is None else 3
    arguments = st.dictionaries(TEXTS, values(markers(parser)), max_size=3)
    calls = st.lists(
        st.tuples(st.sampled_from(sorted(TOOLS)), arguments), min_size=1, max_size=most
    )
    # Calls without a marker are read only at the start of an answer.
    begins_with_json = (form.open + form.before_name).startswith(("{", "[{"))
    before = (
        st.just("") if begins_with_json else st.sampled_from(["", "Let me see.", "a < [b] {c}"])
    )

    @SETTINGS
    @given(before, calls, st.booleans())
    def check(text: str, wanted: list[tuple[str, dict[str, Any]]], escaped: bool) -> None:
        written = [(one, json.dumps(value, ensure_ascii=escaped)) for one, value in wanted]
        answer = read(text + rendered(form, written), parser)
        assert answer == {**({"content": text} if text else {}), "calls": written}

    check()


def test_a_required_call_is_generic_json_in_families_whose_arguments_are_not_json() -> None:
    others = {name for name, parser in TOOL_PARSERS.items() if enforced(parser) is GENERIC_JSON}
    assert others == {"qwen3_coder", "glm45", "pythonic", "olmo3", "json"}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("", None),
        ("{{ messages }}", None),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}', "hermes"),
        ("<|start_of_role|>available_tools<|end_of_role|> ... <|tool_call|> and a list", "granite"),
        ('{{- "[TOOL_CALLS] [" }}{{ out }}', "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral_v11"),
        ("Use exact format: [func_name1(param1=value1, param2=value2)]", "pythonic"),
        ("wrapped in <function_calls></function_calls> XML tags", "olmo3"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument'
            " name and its value}.",
            "llama3_json",
        ),
    ],
)
def test_a_template_chooses_its_familys_parser(template: str, name: str | None) -> None:
    found = tool_parser_for(template)
    assert (found and found.name) == name
