"""Chats with tools and reasoning models: request fields, prompts, and how answers are split into
reasoning, content and calls, however their text is cut into deltas."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from baton_protocol.errors import InvalidRequest
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta, PrefillJob, RunJob
from baton_protocol.sampling import FinishReason
from baton_router.auth import Tenant
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing, ChoiceReader
from baton_router.openai.answers import ChatCompletion, ChatCompletionChunk, CommonFields, Usage
from baton_router.openai.batch_chat import BatchChatCall
from baton_router.openai.call import TextPrompt
from baton_router.openai.chat import ChatCall
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.reasoning import EFFORTS
from baton_router.openai.tools import MAX_DESCRIPTION, MAX_NAME, MAX_TOOLS
from baton_router.requests.tokenize import prepare
from baton_text.artifacts import BYTE_EOS_ID, CHAT_TEMPLATE, byte_artifacts
from baton_text.artifacts import TOKENIZER as TOKENIZER_JSON
from baton_text.chat import ChatTemplate
from baton_text.conversation import RAW_ARGUMENTS
from baton_text.grammars.grammars import Grammars
from baton_text.grammars.limits import MAX_GRAMMAR_BYTES
from baton_text.parsers.hermes import HERMES
from baton_text.parsers.parser import Piece, ToolParser
from baton_text.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    enforced,
    parsers_artifact,
)
from baton_text.tokenizer import Tokenizer
from tests.router.openai.bodies import USER, Json, chat, completion, refusal
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.servings import make_serving

CHAT = "/v1/chat/completions"
TEMPLATE = """\
{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}<think></think>
{%- elif reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}{% endif %}"""


def artifacts() -> dict[str, bytes]:
    """The byte tokenizer's artifacts, with two tokens for the reasoning markers."""
    files = byte_artifacts()
    backend = Backend.from_buffer(files[TOKENIZER_JSON])
    backend.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    return files | {TOKENIZER_JSON: backend.to_str().encode(), CHAT_TEMPLATE: TEMPLATE.encode()}


ARTIFACTS = artifacts()
TOKENIZER = Tokenizer.from_artifacts(ARTIFACTS)
COMMON = CommonFields(id="chatcmpl-1", created=5, model="m", system_fingerprint="f")
CITY: Json = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Json = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": CITY},
}
NOW: Json = {"type": "function", "function": {"name": "now"}}
OFFERED: Json = {"tools": [WEATHER, NOW]}
NAMED_CHOICE: Json = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALLED = ("weather", '{"city": "Paris"}')


def model(*, calls: bool = True, reasons: bool = True) -> PoolModel:
    return PoolModel(
        TOKENIZER,
        ChatTemplate.from_artifacts(ARTIFACTS),
        {},
        HERMES if calls else None,
        REASONING_PARSERS["qwen3"] if reasons else None,
    )


def prompt(**more: Any) -> str:
    [rendered] = chat(**more).prompts(model())
    assert isinstance(rendered, TextPrompt)
    return rendered.text


# --- request fields -------------------------------------------------------------------------------


def tool(**function: Any) -> Json:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


REFUSED: list[tuple[Json, str, str]] = [
    ({"tools": {"type": "function"}}, "tools", "a list of functions"),
    ({"tools": [NOW] * 2}, "tools", "two functions named 'now'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
    (
        {"tools": [WEATHER, {"type": "web_search"}]},
        "tools[1].type",
        '"web_search"; the only supported type',
    ),
    ({"tools": ["now"]}, "tools[0]", "must be an object"),
    ({"tools": [{**NOW, "input_schema": CITY}]}, "tools[0].input_schema", "function.parameters"),
    (tool(name=""), "tools[0].function.name", f"1 to {MAX_NAME}"),
    (tool(name="a b"), "tools[0].function.name", '"a b"; it must have'),
    (tool(name="a" * (MAX_NAME + 1)), "tools[0].function.name", f"1 to {MAX_NAME}"),
    (tool(description=5), "tools[0].function.description", "a string"),
    (tool(description="x" * (MAX_DESCRIPTION + 1)), "tools[0].function.description", "at most"),
    (tool(parameters="{}"), "tools[0].function.parameters", "an object"),
    (
        tool(parameters={"const": "x" * MAX_GRAMMAR_BYTES}),
        "tools[0].function.parameters",
        f"at most {MAX_GRAMMAR_BYTES}",
    ),
    (tool(strict="yes"), "tools[0].function.strict", "true or false"),
    (tool(input_schema=CITY), "tools[0].function.input_schema", "use `function.parameters`"),
    ({"tools": [NOW] * (MAX_TOOLS + 1)}, "tools", f"at most {MAX_TOOLS}"),
    ({"tool_choice": "required"}, "tool_choice", '"required"; it needs tools'),
    ({"tool_choice": "auto"}, "tool_choice", '"auto"; it needs tools'),
    ({"tool_choice": "none"}, "tool_choice", '"none"; it needs tools'),
    ({"tools": None, "tool_choice": "none"}, "tool_choice", '"none"; it needs tools'),
    (NAMED_CHOICE, "tool_choice", "it needs tools"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", "true; it needs tools"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "false; it needs tools"),
    ({"tools": []}, "tools", "[]; name at least one function"),
    ({"tools": [], "tool_choice": "none"}, "tools", "[]; name at least one function"),
    ({"tools": [], **NAMED_CHOICE}, "tools", "[]; name at least one function"),
    ({**OFFERED, "tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
    ({**OFFERED, "tool_choice": {"function": WEATHER["function"]}}, "tool_choice.type", "missing"),
    (
        {**OFFERED, "tool_choice": {"type": "function", "function": {"description": "x"}}},
        "tool_choice.function.name",
        "is missing",
    ),
    ({"tools": [{"function": NOW["function"]}]}, "tools[0].type", "is missing"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    (
        {"tools": [{"type": "function", "function": {"name": None}}]},
        "tools[0].function.name",
        "is null",
    ),
    (
        {"tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
        "is missing; it must have 1 to",
    ),
    ({**OFFERED, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
    (
        {"tools": [NOW, tool()["tools"][0]], **NAMED_CHOICE},
        "tool_choice",
        "its functions are now, f",
    ),
    ({**OFFERED, "tool_choice": {"type": "x"}}, "tool_choice.type", "the only supported type"),
    (
        {**OFFERED, "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
        "one of tools",
    ),
    ({**OFFERED, "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ({"functions": [NOW["function"]]}, "functions", "use `tools`"),
    ({"function_call": {"name": "now"}}, "function_call", "use `tool_choice`"),
    ({"reasoning_effort": "most"}, "reasoning_effort", "none, minimal, low"),
    ({"include_reasoning": "no"}, "include_reasoning", "true or false"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", "[-1, 2147483647]"),
    ({"thinking_token_budget": 2**31}, "thinking_token_budget", "[-1, 2147483647]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
        "messages[0].tool_calls[0].function.name",
        "a string",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": ["now"]}]},
        "messages[0].tool_calls[0]",
        "an object",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_a_wrong_field_is_an_error_with_its_path_and_the_allowed_values(
    fields: Json, param: str, message: str
) -> None:
    error = refusal(chat, **fields)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": None, "parallel_tool_calls": None},
        {**OFFERED, "tool_choice": "none"},
        {**OFFERED, "tool_choice": "none", "parallel_tool_calls": False},
        {"tools": None, "tool_choice": None},
    ],
)
def test_a_chat_without_callable_tools_gets_text(fields: Json) -> None:
    assert chat(**fields).tools is None


@pytest.mark.parametrize(
    "field",
    [
        *("tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "include_reasoning", "thinking_token_budget"),
    ],
)
def test_a_completion_refuses_chat_fields_and_names_the_chat_endpoint(field: str) -> None:
    error = refusal(completion, **{field: []})
    assert error.param == field
    assert "but of /v1/chat/completions" in error.message


WHOLE: Json = {**WEATHER["function"], "strict": True}


@pytest.mark.parametrize(
    "function",
    [
        WHOLE,
        {"name": "weather"},
        {**WHOLE, "parameters": {"type": "object"}},
        {**WHOLE, "strict": None},
    ],
)
def test_a_tool_may_be_chosen_as_the_whole_tool(function: Json) -> None:
    tools = chat(**OFFERED, tool_choice={"type": "function", "function": function}).tools
    assert tools is not None
    assert (tools.named, tools.choice) == ("weather", "required")
    assert tools.functions["weather"].parameters == CITY


def test_other_members_of_a_chosen_tool_are_ignored_as_those_of_tools_are() -> None:
    choice = {**WEATHER, "cache_control": {"type": "ephemeral"}, "more": 1}
    assert chat(**OFFERED, tool_choice=choice).tools == chat(**OFFERED, **NAMED_CHOICE).tools


@pytest.mark.parametrize("budget", [-1, -1.0, None])
def test_a_thinking_budget_of_minus_one_is_no_bound(budget: Any) -> None:
    assert chat(thinking_token_budget=budget).reasoning.budget is None


def test_128_tools_are_accepted() -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(MAX_TOOLS)]
    requested = chat(tools=tools).tools
    assert requested is not None
    assert list(requested.functions) == [f"f{n}" for n in range(MAX_TOOLS)]


# --- the chat template's input --------------------------------------------------------------------


def test_the_template_gets_tools_in_the_form_that_models_expect() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    rendered = prompt(tools=[strict, NOW])
    empty = {"type": "object", "properties": {}}
    filled = {"type": "function", "function": {"name": "now", "parameters": empty}}
    assert rendered == f"<tool>{json.dumps(WEATHER)}</tool><tool>{json.dumps(filled)}</tool>" + (
        "[user]Hi[assistant]"
    )
    assert prompt(tools=[strict], tool_choice="none") == prompt()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": [true]}', '{"b": 1, "a": [true]}'),
        ({"b": 1}, '{"b": 1}'),
        ("", "{}"),
        (None, "{}"),
        *(
            (text, json.dumps({RAW_ARGUMENTS: text}))
            for text in ("[1]", "{city", '{"city": "Par', "[" * 100_000)
        ),
    ],
)
def test_arguments_of_earlier_calls_reach_the_template_as_objects(
    arguments: Any, expected: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    rendered = prompt(
        messages=[
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "18 C"},
        ]
    )
    head = '[user]Hi[assistant]<tool_call>\n{"name": "f", "arguments": '
    assert rendered == f"{head}{expected}}}\n</tool_call>[tool]18 C[assistant]"


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_template_gets_the_reasoning_effort(effort: str) -> None:
    expected = "<think></think>" if effort == "none" else effort
    assert prompt(reasoning_effort=effort).endswith(f"[assistant]{expected}")
    with_kwarg = prompt(reasoning_effort=effort, chat_template_kwargs={"enable_thinking": True})
    assert with_kwarg.endswith(f"[assistant]{effort}")


# --- answers --------------------------------------------------------------------------------------

# Request fields besides OFFERED, the generated text, the message without its role, finish_reason.
ANSWERS: dict[str, tuple[Json, str, Json, str]] = {
    "text": ({}, "It is sunny.", {"content": "It is sunny."}, "stop"),
    "nothing": ({}, "", {"content": ""}, "stop"),
    "a call": ({}, PARIS, {"content": None, "calls": [CALLED]}, "tool_calls"),
    "text and calls": (
        {},
        f"I look.\n{PARIS}\n{TIME}",
        {"content": "I look.", "calls": [CALLED, ("now", "{}")]},
        "tool_calls",
    ),
    "no parallel calls": (
        {"parallel_tool_calls": False},
        f"{PARIS}\n{TIME}\nDone.",
        {"content": "Done.", "calls": [CALLED]},
        "tool_calls",
    ),
    "a call that the client's stop cuts off": (
        {"stop": ["ris"]},
        PARIS[: PARIS.index("ris")],
        {"content": None, "calls": [("weather", '{"city": "Pa')]},
        "stop",
    ),
    "a second call that the client's stop cuts off": (
        {"stop": ["ris"]},
        f"{TIME}\n{PARIS[: PARIS.index('ris')]}",
        {"content": None, "calls": [("now", "{}"), ("weather", '{"city": "Pa')]},
        "stop",
    ),
    "required": ({"tool_choice": "required"}, PARIS, {"calls": [CALLED]}, "tool_calls"),
    "named": (NAMED_CHOICE, PARIS, {"content": None, "calls": [CALLED]}, "stop"),
    "no tools": ({"tools": None}, PARIS, {"content": PARIS}, "stop"),
    "tool_choice none": ({"tool_choice": "none"}, PARIS, {"content": PARIS}, "stop"),
    "reasoning": (
        {"tools": None},
        "<think>\nSo.\n</think>\n\nYes.",
        {"content": "Yes.", "reasoning": "So."},
        "stop",
    ),
    "reasoning and a call": (
        {},
        f"<think>So.</think>{PARIS}",
        {"content": None, "reasoning": "So.", "calls": [CALLED]},
        "tool_calls",
    ),
    "reasoning alone": ({}, "<think>So", {"content": None, "reasoning": "So"}, "stop"),
    "reasoning is left out": (
        {"include_reasoning": False},
        "<think>So.</think>Yes.",
        {"content": "Yes."},
        "stop",
    ),
    "a message is continued": (
        {
            "messages": [USER, {"role": "assistant", "content": "<think>So"}],
            "continue_final_message": True,
        },
        " it is.</think>Yes.",
        {"content": "Yes.", "reasoning": "it is."},
        "stop",
    ),
    "a message is continued behind its reasoning": (
        {
            "messages": [USER, {"role": "assistant", "content": "<think>So</think>Yes"}],
            "continue_final_message": True,
            "echo": True,
        },
        " it <is.",
        {"content": "<think>So</think>Yes it <is."},
        "stop",
    ),
}


def shape(
    fields: Json, *, stream: bool = True, tool_parser: ToolParser = HERMES, **parsers: bool
) -> Any:
    call = chat(**{**OFFERED, "stream": stream, **fields})
    served = replace(model(**parsers), tool_parser=tool_parser)
    parsing = call.parsing(served, call.prompts(served))
    return call.shape(COMMON, [(1, 2)], TOKENIZER, parsing)


def cuts(text: str) -> Iterator[list[str]]:
    yield [text]
    yield list(text) or [""]
    rng = random.Random(len(text))
    for _ in range(8):
        places = sorted(rng.choices(range(len(text) + 1), k=5))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def deltas(parts: list[str], finish: FinishReason = "stop") -> Iterator[Delta]:
    for number, part in enumerate(parts):
        end = finish if number + 1 == len(parts) else None
        yield Delta(RequestId("r"), 1, 0, number, ids=(7,), text=part, finish=end)


def streamed(
    fields: Json, parts: list[str], finish: FinishReason = "stop", tool_parser: ToolParser = HERMES
) -> Json:
    """The message that a client assembles from the stream, with its finish_reason."""
    message: Json = {"role": [], "content": "", "reasoning": "", "calls": [], "ids": []}
    finishes, answer = [], shape(fields, tool_parser=tool_parser)
    for delta in deltas(parts, finish):
        event = answer.event(0, delta)
        if not event:
            continue
        chunk = msgspec.json.decode(event.removeprefix(b"data: "), type=ChatCompletionChunk)
        [choice] = chunk.choices
        part = choice.delta
        assert part.reasoning == part.reasoning_content
        message["role"] += [part.role] if part.role else []
        message["content"] += part.content or ""
        message["reasoning"] += part.reasoning or ""
        for call in part.tool_calls or []:
            if call.id:
                assert call.index == len(message["calls"])
                assert call.type == "function"
                message["calls"].append((call.function.name, ""))
                message["ids"].append(call.id)
            name, arguments = message["calls"][call.index]
            message["calls"][call.index] = name, arguments + call.function.arguments
        finishes.append(choice.finish_reason)
    assert message.pop("role") == ["assistant"]
    assert set(finishes[:-1]) <= {None}
    return message | {"finish": finishes[-1]}


def unstreamed(
    fields: Json, text: str, finish: FinishReason = "stop", tool_parser: ToolParser = HERMES
) -> Json:
    output = ChoiceOutput()
    for delta in deltas([text], finish):
        output.add(delta)
    answer = shape(fields, stream=False, tool_parser=tool_parser).answer([output], Usage.of(2, 1))
    [choice] = msgspec.json.decode(answer, type=ChatCompletion).choices
    message = choice.message
    assert (message.reasoning or None) == (message.reasoning_content or None)
    calls = message.tool_calls or []
    return {
        "content": message.content,
        "reasoning": message.reasoning or "",
        "calls": [(call.function.name, call.function.arguments) for call in calls],
        "ids": [call.id for call in calls],
        "finish": choice.finish_reason,
    }


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_split_into_its_parts_and_a_stream_gives_the_same_for_any_cut(
    name: str,
) -> None:
    fields, text, message, finish = ANSWERS[name]
    expected: Json = {"content": None, "reasoning": "", "calls": [], "finish": finish, **message}
    answer = unstreamed(fields, text)
    ids = answer.pop("ids")
    assert answer == expected
    assert len(set(ids)) == len(expected["calls"])
    assert all(id.startswith("call_") and len(id) == 29 for id in ids)
    for parts in cuts(text):
        assembled = streamed(fields, parts)
        assert assembled == expected | {"content": expected["content"] or "", "ids": ids}, parts


def test_a_call_that_max_tokens_cuts_off_ends_with_length_and_keeps_its_part() -> None:
    text = PARIS[: PARIS.index("ris")]
    assert unstreamed({}, text, "length")["finish"] == "length"
    assert streamed({}, list(text), "length")["calls"] == [("weather", '{"city": "Pa')]


BUDGETS = range(1, 41)
REQUIRED: Json = {"tool_choice": "required"}
# Families of which a required call is written in their own form, and the generic form of the rest.
WITH_FORMS = [name for name, parser in TOOL_PARSERS.items() if enforced(parser) is parser]


def written(family: str, *calls: tuple[str, str]) -> str:
    """An answer of these calls, with their arguments, in the family's form."""
    form = TOOL_PARSERS[family].form
    assert form is not None
    middle = (form.between or "").join(
        f"{form.before_name}{name}{form.before_arguments}{arguments}{form.after_arguments}"
        for name, arguments in calls
    )
    return f"{form.open}{middle}{form.close}"


def split(parsing: AnswerParsing, parts: list[str]) -> Iterator[Piece]:
    """The pieces of an answer that arrives in these parts."""
    reader = ChoiceReader(parsing, "x")
    for part in parts:
        yield from reader.read_text(part, ended=False)
    yield from reader.read_text("", ended=True)


@pytest.mark.parametrize("fields", [REQUIRED, NAMED_CHOICE], ids=["required", "named"])
@pytest.mark.parametrize("family", WITH_FORMS)
def test_a_required_call_has_no_content_wherever_it_is_cut_off(family: str, fields: Json) -> None:
    parser = TOOL_PARSERS[family]
    parallel = fields is REQUIRED and parser.form is not None and parser.form.between is not None
    calls = [CALLED, ("now", "{}")] if parallel else [CALLED]
    call, served = chat(**OFFERED, **fields), replace(model(), tool_parser=parser)
    parsing = call.parsing(served, call.prompts(served))
    assert parsing is not None
    for before in "", "<think>So.</think>":
        text = before + written(family, *calls)
        for budget in (*BUDGETS, len(text)):
            cut = text[:budget]
            whole = list(split(parsing, [cut]))
            assert {piece.kind for piece in whole} <= {"reasoning", "call", "arguments"}, cut
            streamed = list(split(parsing, list(cut)))
            for kind in ("reasoning", "content", "call", "arguments"):
                assert joined(streamed, kind) == joined(whole, kind), cut
        assert [piece.text for piece in whole if piece.kind == "call"] == [
            name for name, _ in calls
        ]


def joined(pieces: list[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


@pytest.mark.parametrize(
    ("fields", "cut"),
    [
        ({**REQUIRED, "parallel_tool_calls": False}, '<tool_call>\n{"na'),
        ({**REQUIRED, "include_reasoning": False}, '<think>So.</think><tool_call>\n{"na'),
        ({**REQUIRED, "response_format": {"type": "json_object"}}, '{"na'),
        (REQUIRED, "<thi"),
        (REQUIRED, "<tool_ca"),
        (REQUIRED, '<tool_call>\n{"name": "weath'),
        (REQUIRED, PARIS + "\n<tool_call>"),
        (REQUIRED, PARIS + '\n<tool_call>\n{"name": "'),
        (NAMED_CHOICE, '<tool_call>\n{"name": "'),
    ],
)
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_markup_of_a_required_call_is_no_content(
    fields: Json, cut: str, finish: FinishReason
) -> None:
    assert not unstreamed(fields, cut, finish)["content"]
    assert streamed(fields, list(cut), finish)["content"] == ""


def test_a_required_call_whose_markers_the_client_hides_is_content() -> None:
    parser = replace(HERMES, reads_special=True)
    hidden = PARIS.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    fields = {**REQUIRED, "skip_special_tokens": True}
    assert unstreamed(fields, hidden, tool_parser=parser)["content"] == hidden


def test_an_answer_without_parsing_has_no_additional_fields() -> None:
    plain = shape({"tools": None}, reasons=False)
    [delta] = deltas(["<think>a"])
    event = json.loads(plain.event(0, delta).removeprefix(b"data: "))
    assert event["choices"][0]["delta"] == {"content": "<think>a", "role": "assistant"}
    output = ChoiceOutput()
    output.add(delta)
    answer = json.loads(plain.answer([output], Usage.of(2, 1)))
    message = {"role": "assistant", "content": "<think>a", "refusal": None}
    assert answer["choices"][0]["message"] == message
    assert set(answer["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_requested_token_ids_are_sent_even_while_their_text_is_held_back() -> None:
    with_ids = shape({"return_token_ids": True})
    events = [with_ids.event(0, delta) for delta in deltas(list(PARIS))]
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert [choice["token_ids"] for choice in choices] == [[7]] * len(PARIS)
    assert choices[0]["delta"] == {"role": "assistant"}


def special(**fields: Any) -> tuple[PoolModel, ChatCall]:
    """A chat with tools and a model whose markers are special tokens."""
    served = replace(model(), tool_parser=replace(HERMES, reads_special=True))
    return served, chat(**OFFERED, **fields)


@pytest.mark.parametrize(
    ("fields", "skipped"),
    [
        ({}, False),
        ({"tool_choice": "none"}, True),
        ({"skip_special_tokens": True}, True),
        ({"skip_special_tokens": False}, False),
    ],
)
async def test_special_tokens_are_kept_in_text_if_the_parser_reads_them(
    fields: Json, skipped: bool
) -> None:
    served, call = special(**fields)
    serving = replace(make_serving(max_model_len=4096), model=served)
    facts: Json = {"tenant": Tenant(), "deadline": 60.0, "rng": random.Random(0)}
    [prepared] = await prepare(call, serving, "r", **facts)
    assert prepared.request.params.skip_special_tokens == skipped


@pytest.mark.parametrize(
    ("fields", "content"), [({}, "Yes."), ({"skip_special_tokens": False}, "Yes.</s>")]
)
def test_the_special_token_that_ends_an_answer_is_not_content(fields: Json, content: str) -> None:
    served, call = special(include_stop_str_in_output=True, **fields)
    parsing = call.parsing(served, call.prompts(served))
    answer_shape = call.shape(COMMON, [(1, 2)], TOKENIZER, parsing)
    eos = TOKENIZER.token_text(BYTE_EOS_ID)
    end = Delta(RequestId("r"), 1, 0, 1, ids=(BYTE_EOS_ID,), text=f"s.{eos}", finish="stop")
    output = ChoiceOutput()
    for delta in (Delta(RequestId("r"), 1, 0, 0, ids=(7,), text="Ye"), end):
        output.add(delta)
    answer = answer_shape.answer([output], Usage.of(2, 2))
    [choice] = msgspec.json.decode(answer, type=ChatCompletion).choices
    assert choice.message.content == content.replace("</s>", eos)


# --- through a router -----------------------------------------------------------------------------


@pytest.fixture
def reasoning_node(decode: FakeNode, prefill: FakeNode) -> FakeNode:
    for node in (decode, prefill):
        node.serve_artifacts(ARTIFACTS)
        node.report = msgspec.structs.replace(
            node.report, max_model_len=4096, vocab_size=TOKENIZER.vocab_size
        )
    return decode


def matches(grammar: str, text: str) -> bool:
    matcher = Grammars(TOKENIZER).matcher(grammar)
    return matcher.accept(TOKENIZER.encode(text, add_special_tokens=False)) and matcher.complete


BAD = '<tool_call>\n{"name": "weather", "arguments": {"town": 1}}\n</tool_call>'
STRICT: Json = {"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, NOW]}
PERSON: Json = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
# Request fields, answers that match the grammar, and answers that do not.
ENFORCED: list[tuple[Json, list[str], list[str]]] = [
    (
        {**OFFERED, "tool_choice": "required"},
        [PARIS, f"{PARIS}\n{TIME}", f"<think>a</think>\n{PARIS}"],
        ["It is.", BAD, f"a{PARIS}"],
    ),
    (
        {**OFFERED, "tool_choice": "required", "parallel_tool_calls": False},
        [PARIS],
        [f"{PARIS}\n{TIME}"],
    ),
    (
        {**OFFERED, "parallel_tool_calls": False},
        ["It is.", PARIS, BAD, f"I look. {PARIS}", f"<think>a</think>\n{PARIS}"],
        [f"{PARIS}\n{TIME}", f"{PARIS}{TIME}", f"{PARIS}\nDone."],
    ),
    ({**OFFERED, **NAMED_CHOICE}, [PARIS], [TIME, "It is.", f"{PARIS}\n{PARIS}"]),
    (STRICT, ["It is.", PARIS, f"I look. {PARIS}"], [BAD]),
    (
        {"response_format": PERSON},
        ['{"city":"Rome"}', '<think>\nSo?\n</think>\n\n{"city":"Rome"}'],
        ["Rome", "<think>So?</think>Rome", '{"city":1}'],
    ),
    ({**OFFERED, "response_format": PERSON}, ['{"city":"Rome"}', PARIS], ["Rome"]),
]


@pytest.mark.integration
async def test_enforced_calls_and_schemas_reach_both_nodes_as_one_grammar(
    running: Any, reasoning_node: FakeNode, prefill: FakeNode
) -> None:
    async with running(reasoning_node, prefill, handoff="always") as client:
        for fields, good, bad in ENFORCED:
            reasoning_node.got.clear()
            prefill.got.clear()
            body = {"messages": [USER], "max_tokens": 4, **fields}
            status, answer, _ = await client.post(CHAT, body)
            assert status == 200, answer
            jobs = prefill.got_of(PrefillJob) + reasoning_node.got_of(RunJob)
            [grammar] = {job.request.params.structured.grammar for job in jobs}
            for text in good:
                assert matches(grammar, text), (fields, text)
            for text in bad:
                assert not matches(grammar, text), (fields, text)


MESSAGE_PARIS = (
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Paris"}'
)
XML_PARIS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>"
)
KEYS_PARIS = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
)
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
# A family, request fields, answers that match the grammar, and answers that do not.
FAMILIES: list[tuple[str, Json, list[str], list[str]]] = [
    ("qwen3_coder", STRICT, ["It is.", f"So:\n{XML_PARIS}"], [XML_PARIS.replace("city", "town")]),
    ("glm45", STRICT, ["It is.", KEYS_PARIS], [KEYS_PARIS.replace("Paris", "Constantinople")]),
    ("pythonic", STRICT, ["It is.", '[weather(city="Paris")]'], ["[weather(city=5)]"]),
    (
        "gpt_oss",
        STRICT,
        [MESSAGE_PARIS, f"{THOUGHT}{MESSAGE_PARIS}", f"{THOUGHT}{FINAL}It is."],
        [MESSAGE_PARIS.replace("city", "town"), "It is."],
    ),
    (
        "gpt_oss",
        {"response_format": PERSON},
        [f'{FINAL}{{"city":"Rome"}}', f'{THOUGHT}{FINAL}{{"city":"Rome"}}'],
        ['{"city":"Rome"}', f'{THOUGHT}{{"city":"Rome"}}', f"{FINAL}Rome"],
    ),
    (
        "gpt_oss",
        {**OFFERED, "response_format": PERSON},
        [f'{FINAL}{{"city":"Rome"}}', f"{THOUGHT}{MESSAGE_PARIS}"],
        [f"{FINAL}Rome"],
    ),
]


@pytest.mark.integration
@pytest.mark.parametrize(("family", "fields", "good", "bad"), FAMILIES)
async def test_each_family_is_enforced_in_its_own_form(
    running: Any, reasoning_node: FakeNode, family: str, fields: Json, good: list[str],
    bad: list[str],
) -> None:  # fmt: skip
    reasoning = "gpt_oss" if family == "gpt_oss" else "none"
    reasoning_node.serve_artifacts(ARTIFACTS | parsers_artifact(family, reasoning))
    async with running(reasoning_node) as client:
        status, answer, _ = await client.post(CHAT, {"messages": [USER], **fields})
        assert status == 200, answer
    [job] = reasoning_node.got_of(RunJob)
    grammar = job.request.params.structured.grammar
    for text in good:
        assert matches(grammar, text), text
    for text in bad:
        assert not matches(grammar, text), text


@pytest.mark.integration
async def test_a_strict_schema_that_the_familys_calls_cannot_carry_is_refused_by_keyword(
    running: Any, reasoning_node: FakeNode
) -> None:
    reasoning_node.serve_artifacts(ARTIFACTS | parsers_artifact("qwen3_coder", "none"))
    city = {"type": "object", "properties": {"city": {"type": "string", "format": "uuid"}}}
    async with running(reasoning_node) as client:
        body = {"messages": [USER], **tool(parameters=city, strict=True)}
        status, answer, _ = await client.post(CHAT, body)
        assert (status, answer["error"]["param"]) == (400, "tools[0].function.parameters"), answer
        assert "properties.city: `format` cannot be enforced" in answer["error"]["message"]
        status, answer, _ = await client.post(CHAT, {**body, "tool_choice": "required"})
        assert status == 200, answer


@pytest.mark.integration
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {**tool(parameters={"type": "objekt"}), "tool_choice": "required"},
            "tools[0].function.parameters",
            "objekt",
        ),
        (
            {"tools": [NOW, *tool(parameters={"type": "array"}, strict=True)["tools"]]},
            "tools[1].function.parameters",
            "array",
        ),
        (
            {
                **OFFERED,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "objekt"}},
                },
            },
            "response_format",
            "objekt",
        ),
    ],
)
async def test_a_schema_that_cannot_be_enforced_is_refused_with_its_path(
    running: Any, reasoning_node: FakeNode, fields: Json, param: str, message: str
) -> None:
    async with running(reasoning_node) as client:
        status, answer, _ = await client.post(CHAT, {"messages": [USER], **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert message in answer["error"]["message"]
    assert reasoning_node.got_of(RunJob) == []


@pytest.mark.integration
async def test_a_schema_that_is_not_enforced_is_not_checked(
    running: Any, reasoning_node: FakeNode
) -> None:
    async with running(reasoning_node) as client:
        body = {"messages": [USER], **tool(parameters={"type": "objekt"})}
        status, answer, _ = await client.post(CHAT, body)
        assert status == 200, answer
    [job] = reasoning_node.got_of(RunJob)
    assert job.request.params.structured is None


@pytest.mark.integration
async def test_a_thinking_budget_requires_a_reasoning_parser(
    running: Any, decode: FakeNode
) -> None:
    async with running(decode) as client:
        body = {"messages": [USER], "thinking_token_budget": 5}
        status, answer, _ = await client.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
    assert "--reasoning-parser" in answer["error"]["message"]


@pytest.mark.integration
async def test_the_official_client_reads_calls_and_reasoning(
    running: Any, reasoning_node: FakeNode
) -> None:
    reasoning_node.script.reply = f"<think>So.</think>{PARIS}".encode()
    tools: Any = [  # the client's stream() accepts only strict functions
        {**tool, "function": {**tool["function"], "strict": True}} for tool in (WEATHER, NOW)
    ]
    messages: Any = [USER]
    async with (
        running(reasoning_node) as router,
        openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as api,
    ):
        answer = await api.chat.completions.create(
            model="fake-model", messages=messages, tools=tools
        )
        async with api.chat.completions.stream(
            model="fake-model",
            messages=messages,
            tools=tools,
            stream_options={"include_usage": True},
        ) as stream:
            from_stream = await stream.get_final_completion()
    for result in (answer, from_stream):
        [choice] = result.choices
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == CALLED
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning_content"] == "So."
        assert result.usage is not None
        assert result.usage.completion_tokens_details is not None
        assert result.usage.completion_tokens_details.reasoning_tokens == 3


# --- docs/tools.md --------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.integration
async def test_the_page_s_python_examples_run_and_send_the_described_requests(
    running: Any, reasoning_node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    reasoning_node.script.reply = f"<think>So.</think>{PARIS}".encode()
    async with running(reasoning_node) as router:
        program = "\n".join(BLOCK.findall(PAGE)).replace("http://localhost:8000", router.url)
        names: Json = {"__name__": "__main__"}
        await asyncio.to_thread(exec, program, names)
        names["client"].close()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == 'weather {"city": "Paris"}'
    assert "So. <tool_call>" in printed
    assert "0 weather " in printed
    jobs = [job.request for job in reasoning_node.got_of(RunJob)]
    structured = [job.params.structured is not None for job in jobs]
    assert structured == [False, False, True, True, False, True]
    prompts = [TOKENIZER.decode(job.prompt_ids) for job in jobs]
    assert '"arguments": {"city": "Paris"}}' in prompts[1]
    assert "[tool]18 degrees, rain" in prompts[1]
    assert prompts[5].endswith("[assistant]low")


@pytest.mark.parametrize(
    "limit",
    [f"{MAX_GRAMMAR_BYTES:,} characters", f"At most {MAX_TOOLS} tools", f"1 to {MAX_NAME} letters"],
)
def test_the_page_states_the_limits(limit: str) -> None:
    assert limit in PAGE


# --- batches --------------------------------------------------------------------------------------


def test_each_answer_of_a_batch_is_split_by_itself() -> None:
    call = BatchChatCall.from_body({"messages": [[USER], [USER, USER]]})
    served = model()
    parsing = call.parsing(served, call.prompts(served))
    outputs = [ChoiceOutput(), ChoiceOutput()]
    for output, text in zip(outputs, ("<think>So</think>Yes", "No"), strict=True):
        for delta in deltas([text]):
            output.add(delta)
    shown = call.shape(COMMON, [(1, 2), (3,)], TOKENIZER, parsing).answer(outputs, Usage.of(3, 2))
    choices = msgspec.json.decode(shown, type=ChatCompletion).choices
    assert [(each.index, each.message.content) for each in choices] == [(0, "Yes"), (1, "No")]
    assert [each.message.reasoning for each in choices] == ["So", None]


def test_a_batch_whose_answers_begin_differently_is_refused() -> None:
    begun = [[USER, {"role": "assistant", "content": text}] for text in ("<think>So", "Well")]
    call = BatchChatCall.from_body({"messages": begun, "continue_final_message": True})
    served = model()
    with pytest.raises(InvalidRequest, match=r"messages\[0\] and messages\[1\] do not") as caught:
        call.parsing(served, call.prompts(served))
    assert caught.value.param == "messages"
    alike = BatchChatCall.from_body({"messages": begun[:1] * 2, "continue_final_message": True})
    assert alike.parsing(served, alike.prompts(served)) is not None
