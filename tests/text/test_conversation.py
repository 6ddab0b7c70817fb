"""Conversations are fitted to templates that know no developer, no second, late or any system
message, no two questions in a row, or that take arguments in one form only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.errors import InvalidRequest
from baton_text.artifacts import CHAT_TEMPLATE, byte_artifacts, read_artifacts
from baton_text.chat import ChatTemplate
from baton_text.conversation import RAW_ARGUMENTS, as_mapping

ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# Each stands for what the templates of a family do with roles.
TEMPLATES = {
    # Qwen 2.5 and 3, Llama 3: any role at any place
    "any place": EACH,
    # SmolLM2 (the demo model), Qwen 2.5
    "default": "{% if messages[0].role != 'system' %}<system>You help.{% endif %}" + EACH,
    # Qwen 3.5
    "only first": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}"
    "{% elif m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Unexpected message role.') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}",
    # GLM, Phi: other roles are left out without an error
    "drops late": "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}"
    "{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}",
    # Mistral, Llama 2: the system message before the last question
    "alternates": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}|{% endif %}"
    "{{ m.content }}{% endfor %}",
    # Gemma 2
    "no system": "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}",
    # GPT-OSS: one message of either role at the beginning
    "developer first": "<system>GPT{% if messages[0].role in ['developer', 'system'] %}<developer>"
    "{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}",
    "developer": "{% for m in messages %}{% if m.role == 'developer' %}<rules>{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}",
    # DeepSeek: all system messages at the beginning
    "gathers": "{% for m in messages if m.role == 'system' %}{{ m.content }};{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    # shows nothing of its messages, so trials tell nothing
    "opaque": "{% for m in messages %}{{ m.role }},{% endfor %}",
}
# Template, roles with texts, the prompt.
FITTED: list[tuple[str, str, str]] = [
    ("any place", "s1 u2 a3 u4", "<system>1<user>2<assistant>3<user>4"),
    ("any place", "d1 u2", "<system>1<user>2"),
    ("any place", "s1 s2 d3 u4", "<system>1\n\n2\n\n3<user>4"),
    ("any place", "s1 u2 d3 s4 u5", "<system>1<user>2<system>3\n\n4<user>5"),
    ("any place", "u1 s2", "<user>1<system>2"),
    ("any place", "u1 u2", "<user>1<user>2"),
    ("default", "u1", "<system>You help.<user>1"),
    ("default", "d1 u2", "<system>1<user>2"),
    ("default", "u1 a2 s3 u4", "<system>3<user>1<assistant>2<user>4"),
    ("default", "u1 s2 u3 s4", "<system>2<user>1<user>3<system>4"),
    ("default", "s1 u2 s3", "<system>1<user>2<system>3"),
    ("only first", "d1 u2", "<system>1<user>2"),
    ("only first", "s1 d2 u3", "<system>1\n\n2<user>3"),
    ("only first", "s1 u2 a3 s4 u5", "<system>1\n\n4<user>2<assistant>3<user>5"),
    ("only first", "u1 a2 t3 d4", "<system>4<user>1<assistant>2<tool>3"),
    ("only first", "u1", "<user>1"),
    ("drops late", "s1 u2 s3 a4 s5 u6", "<system>1\n\n3\n\n5<user>2<assistant>4<user>6"),
    ("drops late", "d1 u2", "<system>1<user>2"),
    ("drops late", "u1 d2", "<system>2<user>1"),
    ("alternates", "s1 u2 a3 u4", "<user>2<assistant>3<user>1|4"),
    ("alternates", "s1 u2 a3 s4 u5", "<user>2<assistant>3<user>1\n\n4|5"),
    ("alternates", "s1 u2 d3 u4", "<user>1\n\n3|2\n\n4"),
    ("alternates", "u1 u2 a3 u4", "<user>1\n\n2<assistant>3<user>4"),
    ("no system", "s1 u2 a3 u4", "<user>1\n\n2<assistant>3<user>4"),
    ("no system", "d1 s2 u3 d4 u5", "<user>1\n\n2\n\n4\n\n3\n\n5"),
    ("no system", "u1 a2 s3 u4", "<user>3\n\n1<assistant>2<user>4"),
    ("no system", "s1", "<user>1"),
    ("no system", "s1 a2 u3", "<user>1<assistant>2<user>3"),
    ("developer first", "d1 u2", "<system>GPT<developer>1<user>2"),
    ("developer first", "s1 d2 u3 s4", "<system>GPT<developer>1\n\n2\n\n4<user>3"),
    ("developer", "s1 d2 u3 d4 d5", "<system>1<rules>2<user>3<rules>4\n\n5"),
    ("gathers", "s1 u2 d3 u4", "1;3;<user>2<user>4"),
    ("opaque", "u1 s2 d3 s4 u5", "user,system,user,"),
    ("opaque", "s1 u2 u3", "system,user,user,"),
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate.from_artifacts(byte_artifacts() | {CHAT_TEMPLATE: source.encode()})


def talk(roles: str) -> list[dict[str, Any]]:
    return [{"role": ROLES[one[0]], "content": one[1:]} for one in roles.split()]


@pytest.mark.parametrize(("name", "roles", "prompt"), FITTED)
def test_instructions_stand_where_the_template_takes_them(
    name: str, roles: str, prompt: str
) -> None:
    assert template(TEMPLATES[name]).render(talk(roles)) == prompt


def test_the_demo_model_has_one_system_prompt_and_no_developer(demo_model: Path) -> None:
    chat = ChatTemplate.from_artifacts(read_artifacts(demo_model))
    system = "<|im_start|>system\n1<|im_end|>\n"
    rest = "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
    for roles in ("s1 u2", "d1 u2", "u2 s1", "u2 d1"):
        assert chat.render(talk(roles)) == system + rest
    assert chat.render(talk("u2")).count("<|im_start|>system\nYou are a helpful") == 1


def test_lists_of_parts_are_merged_in_their_order() -> None:
    part = {"type": "text", "text": "2"}
    source = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    messages = [{"role": "system", "content": text} for text in ("1", [part], [part, part])]
    merged = json.loads(template(source).render(messages))
    assert merged == [{"type": "text", "text": "1"}, part, part, part]
    empty = [{"role": "system", "content": text} for text in ("", [part], "", None)]
    assert json.loads(template(source).render(empty)) == [part]


def test_a_merged_message_is_continued_and_a_moved_one_is_not() -> None:
    only_first = template(TEMPLATES["only first"])
    fields: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert only_first.render(talk("s1 d2"), **fields) == "<system>1\n\n2"
    with pytest.raises(InvalidRequest, match="no instruction at the end") as caught:
        only_first.render(talk("s1 u2 s3"), **fields)
    assert caught.value.param == "continue_final_message"


def test_fitting_leaves_the_clients_messages_unchanged() -> None:
    messages = [*talk("s1 d2 u3"), called('{"a": 1}')]
    before = json.dumps(messages)
    template(TEMPLATES["no system"]).render(messages[:-1])
    template(WALKS).render(messages)
    assert json.dumps(messages) == before


# --- arguments of calls ---------------------------------------------------------------------------

BEGIN = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"
# Qwen3-Coder, GLM; Hermes, Llama; OLMo; DeepSeek V3; a template that prints what it gets
WALKS = (
    f"{BEGIN}{{% for k, v in c.function.arguments|items %}}<{{{{ k }}}}={{{{ v }}}}>{{% endfor %}}"
    f"{END}"
)
PRINTS_JSON = f"{BEGIN}{{{{ c.function.arguments | tojson }}}}{END}"
EITHER = (
    f"{BEGIN}{{% set a = c.function.arguments %}}{{{{ a if a is string else a | tojson }}}}{END}"
)
JOINS = f"{BEGIN}{{{{ c.function.name + ':' + c.function.arguments }}}}{END}"
PRINTS = f"{BEGIN}{{{{ c.function.arguments }}}}{END}"
CUT = '{"a": "unfinished'


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call12345", "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("source", "arguments", "prompt"),
    [
        (WALKS, '{"a": 1}', "<a=1>"),
        (WALKS, {"a": 1}, "<a=1>"),
        (WALKS, CUT, f"<{RAW_ARGUMENTS}={CUT}>"),
        (WALKS, "", ""),
        (WALKS, " \n", ""),
        (WALKS, None, ""),
        (PRINTS_JSON, '{"a": "é"}', '{"a": "é"}'),
        (PRINTS_JSON, CUT, json.dumps({RAW_ARGUMENTS: CUT})),
        (EITHER, CUT, json.dumps({RAW_ARGUMENTS: CUT})),
        (JOINS, '{"a":1}', 'f:{"a":1}'),
        (JOINS, {"a": "é"}, 'f:{"a": "é"}'),
        (JOINS, CUT, f"f:{CUT}"),
        (JOINS, None, "f:{}"),
        (PRINTS, '{"a": "b"}', '{"a": "b"}'),
        (PRINTS, {"a": "b"}, '{"a": "b"}'),
    ],
)
def test_a_template_gets_arguments_in_the_form_that_it_takes(
    source: str, arguments: Any, prompt: str
) -> None:
    assert template(source).render([called(arguments)]) == prompt


@pytest.mark.parametrize(
    ("arguments", "mapping"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ('"{\\"a\\": 1}"', {"a": 1}),  # encoded twice
        ("null", {}),
        ('""', {}),
        *((text, {RAW_ARGUMENTS: text}) for text in ("[1]", "5", '"so"', "{a", "a=1", CUT)),
        ("[" * 100_000, {RAW_ARGUMENTS: "[" * 100_000}),
        ([1], {RAW_ARGUMENTS: [1]}),
    ],
)
def test_arguments_are_a_mapping_whatever_a_client_sends(
    arguments: Any, mapping: dict[str, Any]
) -> None:
    assert as_mapping(arguments) == mapping


@pytest.mark.parametrize("bad", [0, 1, 4, 6])
def test_the_error_names_the_first_call_that_the_template_refuses(bad: int) -> None:
    strict = (
        f"{BEGIN}{{% if c.function.arguments.no %}}{{{{ raise_exception('no no') }}}}{{% endif %}}"
        f"{{{{ c.function.arguments | tojson }}}}{END}"
    )
    messages = [{"role": "user", "content": "Hi"}]
    for number in range(7):
        messages += [called('{"no": true}' if number in (bad, 6) else CUT)]
    with pytest.raises(InvalidRequest, match="no no") as caught:
        template(strict).render(messages)
    at = f"messages[{bad + 1}].tool_calls[0].function.arguments"
    assert caught.value.param == at
    assert f"refuses {at}: no no" in caught.value.message


def test_an_error_that_no_call_causes_names_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: no") as caught:
        template("{{ raise_exception('no') }}").render([called(CUT)])
    assert caught.value.param == "messages"


def test_each_named_template_has_its_own_rules() -> None:
    files = byte_artifacts() | {CHAT_TEMPLATE: TEMPLATES["only first"].encode()}
    with_tools = "{% for t in tools %}{{ t.type }}{% endfor %}" + TEMPLATES["any place"]
    files["additional_chat_templates/tool_use.jinja"] = with_tools.encode()
    chat = ChatTemplate.from_artifacts(files)
    assert chat.render(talk("s1 u2 s3")) == "<system>1\n\n3<user>2"
    rendered = chat.render(talk("s1 u2 s3"), tools=[{"type": "function"}])
    assert rendered == "function<system>1<user>2<system>3"
