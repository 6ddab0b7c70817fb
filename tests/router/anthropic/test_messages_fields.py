"""Bodies of the Messages API: what each field becomes, and the error for each that is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton_protocol.errors import InvalidRequest
from baton_router.anthropic.messages import MessagesCall
from baton_router.anthropic.tools import MAX_NAME
from baton_router.openai.tools import MAX_TOOLS
from tests.router.openai.bodies import USER, Json
from tests.router.openai.test_tools import CITY, model

TOOL: Json = {"name": "weather", "description": "Of a city.", "input_schema": CITY}
CALLED: Json = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words} | more


def body(**fields: Any) -> Json:
    return {"max_tokens": 9, "messages": [USER]} | fields


def call(**fields: Any) -> MessagesCall:
    return MessagesCall.from_body(body(**fields))


def result(content: Any = "18 C", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content} | more


def said(role: str, *blocks: Any) -> Json:
    return {"role": role, "content": list(blocks)}


# Messages of a client and the messages that the template gets.
CONVERSATIONS: dict[str, tuple[list[Json], list[Json]]] = {
    "texts": (
        [USER, {"role": "assistant", "content": "Hello."}, USER],
        [USER, {"role": "assistant", "content": "Hello."}, USER],
    ),
    "blocks of a user": (
        [said("user", text("a", cache_control={"type": "ephemeral"}), text("b"))],
        [{"role": "user", "content": "a\nb"}],
    ),
    "an instruction in between": (
        [USER, said("system", text("Be brief.")), USER],
        [USER, {"role": "system", "content": "Be brief."}, USER],
    ),
    "blocks of an answer": (
        [
            USER,
            said(
                "assistant",
                {"type": "thinking", "thinking": "So.", "signature": "of any server"},
                {"type": "redacted_thinking", "data": "secret"},
                text("Let me ", citations=None),
                text("look."),
                CALLED | {"caller": {"type": "direct"}},
            ),
            said("user", result()),
        ],
        [
            USER,
            {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "So.",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": {"city": "Paris"}},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "18 C"},
        ],
    ),
    "results and texts": (
        [
            said(
                "user",
                result([text("18"), text("C")]),
                result("no such city", is_error=True),
                result(None),
                text("And now?"),
            )
        ],
        [
            {"role": "tool", "tool_call_id": "c1", "content": "18\nC"},
            {"role": "tool", "tool_call_id": "c1", "content": "Error: no such city"},
            {"role": "tool", "tool_call_id": "c1", "content": ""},
            {"role": "user", "content": "And now?"},
        ],
    ),
    "nothing": (
        [said("user"), said("assistant")],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    ),
}


@pytest.mark.parametrize(("given", "shown"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_blocks_become_messages_of_the_template(given: list[Json], shown: list[Json]) -> None:
    assert call(messages=given).messages == shown


def test_the_system_prompt_comes_first_as_a_text_or_as_blocks() -> None:
    for system in ("a\nb", [text("a"), text("b", cache_control={"type": "ephemeral"})]):
        assert call(system=system).messages == [{"role": "system", "content": "a\nb"}, USER]
    assert call(system="").messages == [USER]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    begun = call(messages=[USER, {"role": "assistant", "content": "It is"}])
    [prompt] = begun.prompts(model())
    assert prompt.text == "[user]Hi[assistant]It is"  # type: ignore[union-attr]
    assert begun.continues_prompt
    [whole] = call().prompts(model())
    assert whole.text == "[user]Hi[assistant]"  # type: ignore[union-attr]


def test_sampling_fields_have_the_names_of_sampling_parameters() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "ignore_eos": True}
    sampling = call(**given, stop_sequences=["a", "b"], priority=2).sampling
    assert {name: sampling[name] for name in given} == given
    assert sampling["stop"] == ("a", "b")
    # The context may leave fewer tokens than a client must ask for.
    assert "max_tokens" not in sampling
    assert call(max_tokens=1 << 40).default_max_tokens == 1 << 40


def test_max_tokens_0_computes_the_prompt_alone() -> None:
    asked = call(max_tokens=0)
    assert (asked.options.generates, asked.default_max_tokens) == (False, 1)


CHOICES: list[tuple[Json | None, tuple[str, str | None, bool] | None]] = [
    (None, ("auto", None, True)),
    ({"type": "auto"}, ("auto", None, True)),
    ({"type": "any"}, ("required", None, True)),
    ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
    ({"type": "tool", "name": "weather"}, ("required", "weather", True)),
    ({"type": "none"}, None),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_tools_and_choices_are_those_of_a_chat(
    choice: Json | None, expected: tuple[str, str | None, bool] | None
) -> None:
    tools = call(tools=[TOOL | {"strict": True}], tool_choice=choice).tools
    if expected is None:
        assert tools is None
        return
    assert tools is not None
    assert (tools.choice, tools.named, tools.parallel) == expected
    [function] = tools.functions.values()
    assert (function.name, function.parameters, function.strict) == ("weather", CITY, True)


def test_an_empty_list_of_tools_is_no_tools() -> None:
    assert call(tools=[]).tools is None


def thinking(**members: Any) -> Json:
    return {"thinking": members}


REASONING: list[tuple[Json, bool, int | None, Json]] = [
    ({}, True, None, {}),
    (thinking(type="enabled", budget_tokens=7), True, 7, {"enable_thinking": True}),
    (thinking(type="disabled"), False, None, {"enable_thinking": False}),
    (thinking(type="adaptive", display="omitted"), False, None, {}),
    ({"output_config": {"effort": "low"}}, True, None, {"reasoning_effort": "low"}),
]


@pytest.mark.parametrize(("fields", "included", "budget", "kwargs"), REASONING)
def test_thinking_becomes_reasoning(
    fields: Json, included: bool, budget: int | None, kwargs: Json
) -> None:
    reasoning = call(**fields).reasoning
    assert (reasoning.included, reasoning.budget, dict(reasoning.kwargs)) == (
        included,
        budget,
        kwargs,
    )


def test_a_bound_of_thinking_needs_no_model_that_thinks() -> None:
    asked = call(**thinking(type="enabled", budget_tokens=7))
    thinks, plain = model(), model(reasons=False)
    parsing = asked.parsing(thinks, asked.prompts(thinks))
    assert parsing is not None
    assert parsing.rules is not None
    assert parsing.rules.budget == 7
    assert parsing.fields == ("thinking.budget_tokens",)
    assert asked.parsing(plain, asked.prompts(plain)) is None


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_a_format_is_a_grammar(name: str) -> None:
    form = {"type": "json_schema", "schema": CITY}
    grammar = call(**{name: form if name == "output_format" else {"format": form}}).grammar
    assert grammar is not None
    assert grammar.kind == "json"
    assert grammar.field.startswith(name)


def image(**more: Any) -> Json:
    return {"type": "image", "source": {"type": "base64", "data": "", **more}}


DEEP: Any = {}
for _ in range(2000):
    DEEP = {"a": DEEP}
REFUSED: list[tuple[Json, str, str]] = [
    ({"max_tokens": None}, "max_tokens", "an integer"),
    ({"max_tokens": -1}, "max_tokens", "0 or more"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": ["Hi"]}, "messages[0]", "an object"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "use one of user"),
    ({"messages": [USER | {"role": "tool"}]}, "messages[0].role", "use one of user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [said("user", "Hi")]}, "messages[0].content[0]", "an object"),
    ({"messages": [said("user", image())]}, "messages[0].content[0].type", "reads text only"),
    (
        {"messages": [said("user", {"type": "document", "source": {}})]},
        "messages[0].content[0].type",
        "reads text only",
    ),
    ({"messages": [said("user", CALLED)]}, "messages[0].content[0].type", "text, tool_result"),
    ({"messages": [said("assistant", result())]}, "messages[0].content[0].type", "tool_use"),
    ({"messages": [said("user", {"type": "text"})]}, "messages[0].content[0].text", "needs it"),
    (
        {"messages": [said("user", result([image()]))]},
        "messages[0].content[0].content[0].type",
        "reads text only",
    ),
    ({"messages": [USER, said("assistant", CALLED)]}, "messages", "tool_result"),
    (
        {"messages": [said("assistant", CALLED | {"input": "x"}), USER]},
        "messages[0].content[0].input",
        "an object",
    ),
    (
        {"messages": [said("assistant", CALLED | {"input": DEEP}), USER]},
        "messages[0].content[0].input",
        "nested too deep",
    ),
    ({"system": [image()]}, "system[0].type", "it must be text"),
    ({"system": 5}, "system", "a string or a list"),
    ({"tools": {}}, "tools", "a list"),
    ({"tools": [TOOL, TOOL]}, "tools", "two functions named 'weather'"),
    ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools", f"at most {MAX_TOOLS}"),
    ({"tools": [TOOL | {"name": "x" * (MAX_NAME + 1)}]}, "tools[0].name", f"1 to {MAX_NAME}"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "missing"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type",
        '"web_search_20250305"; this server has no tools of its own',
    ),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading", "leave it out"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "an object"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "a tool's name"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "now"}},
        "tool_choice.name",
        "it has weather",
    ),
    (thinking(type="always"), "thinking.type", "enabled, adaptive"),
    (thinking(type="enabled", budget_tokens=0), "thinking.budget_tokens", "in ["),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "json_schema"),
    (
        {
            "output_format": {"type": "json_schema", "schema": {}},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        "output_format",
        "both constrain",
    ),
    ({"stop_sequences": [""]}, "stop_sequences", "1 to"),
    ({"top_k": 1.5}, "top_k", "an integer"),
    ({"container": "c"}, "container", "runs no code"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "calls no tools"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
    ({"maxtokens": 5}, "maxtokens", "did you mean 'max_tokens'?"),
    ({"n": 2}, "n", "but of /v1/"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_a_wrong_field_is_an_error_with_its_path_and_the_allowed_values(
    fields: Json, param: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call(**fields)
    assert caught.value.param == param
    assert message in caught.value.message


def test_hints_are_accepted_without_an_effect() -> None:
    hints: Json = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "speed": "standard",
        "container": None,
        "mcp_servers": [],
        "tools": [TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}}],
    }
    assert call(**hints) == call(tools=[TOOL])


def test_a_counted_conversation_has_the_prompt_of_an_answered_one() -> None:
    fields: Json = {"messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    counted = MessagesCall.counted(fields)
    assert counted.prompts(model()) == call(**fields).prompts(model())
    assert replace(counted, max_tokens=9, default_max_tokens=9).messages == call(**fields).messages
    with pytest.raises(InvalidRequest, match="not a field of /v1/messages/count_tokens"):
        MessagesCall.counted(body())
