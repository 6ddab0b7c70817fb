"""What a client got back, it may send again: members of messages, parts, tools and calls that carry
no instruction are ignored, and parts of earlier answers are text or reasoning."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from baton_protocol.errors import InvalidRequest
from baton_protocol.link import RunJob
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.call import TextPrompt
from baton_router.openai.chat import ChatCall
from baton_text.artifacts import CHAT_TEMPLATE, byte_artifacts
from baton_text.chat import ChatTemplate
from baton_text.conversation import RAW_ARGUMENTS
from baton_text.tokenizer import Tokenizer
from tests.router.openai.bodies import USER, Json, chat, refusal
from tests.support.nodes.fake_node import FakeNode

FILES = byte_artifacts() | {
    CHAT_TEMPLATE: b"{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
}
MODEL = PoolModel(Tokenizer.from_artifacts(FILES), ChatTemplate.from_artifacts(FILES), {})
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HINT: Json = {"type": "ephemeral", "ttl": "1h"}


def prompt(*messages: Json, **fields: Any) -> str:
    """The prompt of a template that prints everything it sees."""
    [rendered] = chat(messages=messages, **fields).prompts(MODEL)
    assert isinstance(rendered, TextPrompt)
    return rendered.text


def reply(content: Any = "Yes", **members: Any) -> Json:
    return {"role": "assistant", "content": content, **members}


# --- members without an instruction ---------------------------------------------------------------

OF_MESSAGES: list[Json] = [
    {"provider_specific_fields": {"refusal": None}},  # LiteLLM
    {"thinking_blocks": [{"type": "thinking", "thinking": "So", "signature": "x"}]},
    {"parsed": {"a": 1}},  # openai's parse()
    {"reasoning_details": [{"type": "reasoning.text", "text": "So"}]},  # OpenRouter
    {"reasoning_signature": "x", "reasoning_opaque": "x", "encrypted_content": "x"},
    {"id": "msg_1", "created_at": 5, "status": "completed", "index": 0},
    {"additional_kwargs": {}, "response_metadata": {}, "usage_metadata": {}, "lc": 1},  # langchain
    {"providerOptions": {"openai": {}}, "experimental_providerMetadata": {}},  # Vercel's AI SDK
    {"finish_reason": "stop", "logprobs": None, "stop_reason": None, "token_ids": [1]},
    {"cache_control": HINT},
    {"contents": "x", "weight": 1, "metadata": {"a": "b"}},
    {"audio": None, "images": [], "prefix": False},
    {"tool_calls": [], "function_call": None, "refusal": None},
    {"reasoning": {"effort": "low"}, "thinking": [{"type": "text"}], "reasoning_content": None},
]


@pytest.mark.parametrize("members", OF_MESSAGES, ids=",".join)
@pytest.mark.parametrize(
    "message",
    [
        *(USER, reply(), {"role": "system", "content": "Be brief"}),
        *(reply(None, tool_calls=[CALL]), {"role": "tool", "tool_call_id": "c1", "content": "so"}),
    ],
    ids=["user", "assistant", "system", "call", "tool"],
)
def test_members_of_a_message_without_an_instruction_change_nothing(
    message: Json, members: Json
) -> None:
    assert prompt(USER, {**members, **message}) == prompt(USER, message)


@pytest.mark.parametrize(
    "members",
    [
        {"index": 0},
        {"provider_specific_fields": {"thought_signature": "x"}},
        {"extra_content": {"google": {"thought_signature": "x"}}},
        {"cache_control": HINT},
        {"parsed": 1, "caller": {"type": "direct"}, "custom": None},
    ],
    ids=",".join,
)
def test_members_of_a_call_without_an_instruction_change_nothing(members: Json) -> None:
    function = CALL["function"]
    for call in (
        {**members, **CALL},
        {**CALL, "function": {**members, "parsed_arguments": {"a": 1}, **function}},
    ):
        assert prompt(reply(None, tool_calls=[call])) == prompt(reply(None, tool_calls=[CALL]))


@pytest.mark.parametrize(
    "members",
    [
        {"cache_control": HINT},
        {"prompt_cache_breakpoint": True},
        {"annotations": [], "citations": None, "signature": "x"},
        {"providerOptions": {}, "id": "part_1", "index": 0, "lang": "en"},
    ],
    ids=",".join,
)
def test_members_of_a_part_without_an_instruction_change_nothing(members: Json) -> None:
    part = {"type": "text", "text": "Hi", **members}
    assert prompt({**USER, "content": [part]}) == prompt(USER)


@pytest.mark.parametrize(
    "members",
    [
        {"cache_control": HINT},
        {"defer_loading": False, "eager_input_streaming": True, "allowed_callers": ["direct"]},
        {"input_examples": [{"a": 1}], "kind": 1},
        {"id": "tool_1", "returns": {"type": "string"}, "metadata": {}},
    ],
    ids=",".join,
)
def test_members_of_a_tool_without_an_instruction_change_nothing(members: Json) -> None:
    for tool in ({**members, **TOOL}, {**TOOL, "function": {**members, **TOOL["function"]}}):
        assert prompt(USER, tools=[tool]) == prompt(USER, tools=[TOOL])


def test_a_hint_for_caching_may_stand_in_the_body() -> None:
    assert prompt(USER, cache_control=HINT) == prompt(USER)


# --- parts ----------------------------------------------------------------------------------------

TEXT: Json = {"type": "text", "text": "Yes"}


@pytest.mark.parametrize(
    ("message", "like"),
    [
        (reply([{"type": "refusal", "refusal": "No"}]), reply("No")),
        (reply([TEXT, {"type": "refusal", "refusal": "No"}]), reply("Yes\nNo")),
        (reply(None, refusal="No"), reply("No", refusal="No")),
        (reply([{"type": "output_text", "text": "Yes", "annotations": []}]), reply()),
        ({**USER, "content": [{"type": "input_text", "text": "Hi"}]}, USER),
        (
            reply([{"type": "thinking", "thinking": "So", "signature": "x"}, TEXT]),
            reply(reasoning_content="So"),
        ),
        (
            reply([{"type": "thinking", "thinking": [{"type": "text", "text": "So"}]}, TEXT]),
            reply(reasoning_content="So"),
        ),
        (reply([{"type": "reasoning", "text": "So"}, TEXT]), reply(reasoning_content="So")),
        (reply([{"type": "reasoning", "reasoning": "So"}, TEXT]), reply(reasoning_content="So")),
        (
            reply(
                [
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So"}]},
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "on"}]},
                    TEXT,
                ]
            ),
            reply(reasoning_content="So\non"),
        ),
        (reply([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, TEXT]), reply()),
        (reply([{"type": "redacted_thinking", "data": "x"}, TEXT]), reply()),
        (
            reply([{"type": "redacted_thinking", "data": "x"}], tool_calls=[CALL]),
            reply("", tool_calls=[CALL]),
        ),
        (
            reply([{"type": "thinking", "thinking": "So"}, TEXT], reasoning_content="Then"),
            reply(reasoning_content="Then"),
        ),
        (
            reply([{"type": "thinking", "thinking": "So"}, TEXT], reasoning="Then"),
            reply(reasoning="Then"),
        ),
        (
            {**USER, "content": [{"type": "thinking", "thinking": "So"}, TEXT]},
            {**USER, "content": "Yes"},
        ),
    ],
)
def test_parts_of_an_earlier_answer_are_text_or_reasoning(message: Json, like: Json) -> None:
    assert prompt(USER, message) == prompt(USER, like)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        (reply(prefix=True), "prefix", "use `continue_final_message`"),
        (reply(partial=True), "partial", "use `continue_final_message`"),
        (reply(audio={"id": "audio_1"}), "audio", "models read and write text only"),
        ({**USER, "images": ["aGk="]}, "images", "models read and write text only"),
        (reply(tool_calls=[{**CALL, "type": "custom"}]), "tool_calls[0].type", "only supported"),
        (reply(tool_calls=[{"id": "c1"}]), "tool_calls[0].function", "must be an object"),
        (
            reply(tool_calls=[CALL, {"function": {"name": "f", "arguments": [1]}}]),
            "tool_calls[1].function.arguments",
            "a JSON object, or its text",
        ),
        *(
            (
                {**USER, "content": [TEXT, {"type": kind, kind: {"url": "x"}}]},
                "content[1]",
                f'not parts of type "{kind}"',
            )
            for kind in ("image_url", "input_audio", "file", "video_url", "tool_use")
        ),
        ({**USER, "content": ["Hi"]}, "content[0]", "an object with type and text"),
        ({**USER, "content": [{"type": "text", "text": 5}]}, "content[0].text", "a string"),
        (reply([{"type": "refusal", "text": "No"}]), "content[0].refusal", "a string"),
        ({"role": "user"}, "content", "a string or a list"),
        ({"role": 5, "content": "x"}, "role", "a string"),
    ],
)
def test_a_member_that_would_change_the_answer_is_refused_by_its_path(
    message: Json, param: str, words: str
) -> None:
    error = refusal(chat, messages=[USER, message])
    assert error.param == f"messages[1].{param}"
    assert words in error.message


def test_unknown_members_of_the_body_stay_refused() -> None:
    for name in ("provider_specific_fields", "cache_controls", "thinking"):
        error = refusal(chat, **{name: {}})
        assert error.param == name
        assert "is not a field" in error.message


def test_a_deep_call_is_named_by_the_error() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    calls = [CALL, {"function": {"name": "f", "arguments": deep}}]
    call = ChatCall.from_body({"messages": [USER, reply(tool_calls=calls)]})
    with pytest.raises(InvalidRequest, match="nested too deep") as caught:
        assert call.rendered
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"
    while deep:  # freeing it at once would exhaust the stack
        deep = deep.pop("a")


def test_an_unfinished_call_is_sent_back_as_a_mapping() -> None:
    cut = '{"a": "unfinished'
    call = {"id": "c1", "function": {"name": "f", "arguments": cut}}
    mapped = {**CALL, "function": {"name": "f", "arguments": {RAW_ARGUMENTS: cut}}}
    assert prompt(reply(tool_calls=[call])) == prompt(reply(tool_calls=[mapped]))


# --- over a socket --------------------------------------------------------------------------------

# As Qwen 3.5's: one system message, no other roles, calls whose arguments are walked.
STRICT = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}
{%- elif m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('role') }}
{%- endif %}<{{ m.role }}>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{%- for k, v in c.function.arguments|items %} {{ k }}={{ v }}{% endfor %}</tool_call>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
LATER: list[tuple[list[Json], str]] = [
    ([{"role": "developer", "content": "Be brief"}, USER], "<system>Be brief<user>Hi"),
    (
        [USER, reply(), {"role": "system", "content": [TEXT]}, USER],
        "<system>Yes<user>Hi<assistant>Yes<user>Hi",
    ),
    (
        [
            USER,
            reply(None, tool_calls=[{**CALL, "function": {"name": "f", "arguments": '{"a": "b'}}]),
            {"role": "tool", "tool_call_id": "c1", "content": "so"},
        ],
        '<user>Hi<assistant><tool_call>f raw_arguments={"a": "b</tool_call><tool>so',
    ),
]


@pytest.mark.integration
async def test_later_turns_reach_a_node_with_a_strict_template(
    running: Any, decode: FakeNode
) -> None:
    decode.serve_artifacts(FILES | {CHAT_TEMPLATE: STRICT.encode()})
    async with (
        running(decode) as router,
        openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        create: Any = client.chat.completions.create
        for messages, _ in LATER:
            await create(model="fake-model", messages=messages, max_tokens=2)
        jobs = decode.got_of(RunJob)
        prompts = [MODEL.tokenizer.decode(job.request.prompt_ids) for job in jobs]
        assert prompts == [f"{text}<assistant>" for _, text in LATER]
        decode.script.reply = b"<think>So.</think>Yes."
        first = await create(model="fake-model", messages=[USER])
        message = first.choices[0].message
        assert message.reasoning_content == "So."
        await create(model="fake-model", messages=[USER, message, USER])
    last = MODEL.tokenizer.decode(decode.got_of(RunJob)[-1].request.prompt_ids)
    assert last == "<user>Hi<assistant><think>So.</think>Yes.<user>Hi<assistant>"
