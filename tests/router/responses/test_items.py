"""Items of a response's input: the messages that they are, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_protocol.errors import InvalidRequest
from baton_router.openai.call import TextPrompt
from baton_router.responses.call import ResponseCall
from baton_router.responses.items import INPUT, MAX_ITEMS, encoded_reasoning, messages_of
from tests.router.openai.test_tools import model

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "Hi"}
CALL: Json = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
TWICE: Json = CALL | {"call_id": "c2"}
RESULT: Json = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
SAID: Json = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}],
}
THOUGHT: Json = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
CALLED: Json = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CASES: dict[str, tuple[Any, list[Json]]] = {
    "text": ("Hi", [{"role": "user", "content": "Hi"}]),
    "parts": (
        [{"role": "user", "content": [{"type": "input_text", "text": each} for each in "ab"]}],
        [{"role": "user", "content": "a\nb"}],
    ),
    "roles": (
        [{"role": role, "content": "x"} for role in ("system", "developer", "user")],
        [{"role": role, "content": "x"} for role in ("system", "developer", "user")],
    ),
    "a turn": (
        [USER, THOUGHT, SAID, CALL, RESULT],
        [
            USER,
            {
                "role": "assistant",
                "content": "Yes.",
                "reasoning_content": "Hm.",
                "tool_calls": [CALLED],
            },
            {"role": "tool", "content": "noon", "tool_call_id": "c1"},
        ],
    ),
    "two calls": (
        [CALL, TWICE],
        [{"role": "assistant", "content": "", "tool_calls": [CALLED, {**CALLED, "id": "c2"}]}],
    ),
    "text after a call": (
        [CALL, SAID],
        [
            {"role": "assistant", "content": "", "tool_calls": [CALLED]},
            {"role": "assistant", "content": "Yes."},
        ],
    ),
    "encrypted reasoning": (
        [
            {"type": "reasoning", "summary": [], "encrypted_content": encoded_reasoning("Hm.")},
            {"type": "reasoning", "summary": [], "encrypted_content": "another server's"},
            SAID,
        ],
        [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}],
    ),
    "a summary": (
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, SAID],
        [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_items_become_the_messages_of_a_template(case: str) -> None:
    given, expected = CASES[case]
    items = INPUT.read("input", given)
    assert messages_of(items) == expected
    kept = msgspec.json.decode(msgspec.json.encode(items))
    assert messages_of(INPUT.read("input", kept)) == expected, "items may be sent again"


REFUSED: list[tuple[Any, str, str]] = [
    ([], "input", "at least one item"),
    (7, "input", "a text, or a list"),
    (["Hi"], "input[0]", "must be an object"),
    ([USER] * (MAX_ITEMS + 1), "input", f"at most {MAX_ITEMS}"),
    ([{"type": "item_reference", "id": "msg_1"}], "input[0].type", "the item itself"),
    ([{"type": "computer_call"}], "input[0].type", "function_call_output"),
    ([{"role": "tool", "content": "x"}], "input[0].role", "use one of user"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0]", "text only"),
    ([{**CALL, "arguments": {}}], "input[0].arguments", "must be a string"),
    ([USER, {**RESULT, "call_id": None}], "input[1].call_id", "must be a string"),
    ([{**SAID, "id": "x" * 257}], "input[0].id", "at most 256"),
]


@pytest.mark.parametrize(("given", "param", "reason"), REFUSED)
def test_a_wrong_item_is_named(given: Any, param: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        INPUT.read("input", given)
    assert caught.value.param == param


def prompt(call: ResponseCall) -> str:
    [rendered] = call.prompts(model())
    assert isinstance(rendered, TextPrompt)
    return rendered.text


def test_a_prompt_has_instructions_then_what_it_continues_then_the_input() -> None:
    body = {"input": "And?", "instructions": "Be brief.", "previous_response_id": "resp_1"}
    call = ResponseCall.from_body(body)
    with pytest.raises(InvalidRequest, match="send all items as input"):
        call.prompts(model())
    continued = call.continued(INPUT.read("input", [USER, SAID]))
    assert prompt(continued).startswith("[system]Be brief.[user]Hi[assistant]Yes.[user]And?")
    assert len(continued.items) == 3


def test_only_allowed_tools_are_in_the_prompt() -> None:
    tools = [{"type": "function", "name": name} for name in ("now", "weather")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": tools[:1]}
    call = ResponseCall.from_body({"input": "Hi", "tools": tools, "tool_choice": allowed})
    assert '"now"' in prompt(call)
    assert '"weather"' not in prompt(call)
    assert call.tools is not None
    assert (call.tools.required, list(call.tools.callable)) == (True, ["now"])
    assert call.echoed["tool_choice"] == allowed
    none = ResponseCall.from_body({"input": "Hi", "tools": tools, "tool_choice": "none"})
    assert none.tools is None


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"max_output_tokens": 5}, {"max_tokens": 5}),
        ({"top_logprobs": 2}, {"logprobs": 2}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
        ({"stop": "x", "top_k": 3, "seed": 1}, {"stop": ("x",), "top_k": 3, "seed": 1}),
        ({"temperature": 0.5, "top_p": 0.25}, {"temperature": 0.5, "top_p": 0.25}),
    ],
)
def test_fields_become_sampling_parameters(fields: Json, sampling: Json) -> None:
    given = ResponseCall.from_body({"input": "Hi"} | fields).sampling
    plain = ResponseCall.from_body({"input": "Hi"}).sampling
    assert given == plain | sampling


def test_the_form_of_the_text_is_a_grammar() -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    grammar = ResponseCall.from_body({"input": "Hi", "text": {"format": form}}).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.field) == ("json", "text.format.schema")
    assert msgspec.json.decode(str(grammar.value)) == schema
    for beside in ({"structured_outputs": {"regex": "a"}}, {"allowed_token_ids": [1]}):
        with pytest.raises(InvalidRequest, match="send only one of them"):
            ResponseCall.from_body({"input": "Hi", "text": {"format": form}, **beside})
