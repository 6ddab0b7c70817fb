"""Templates render as in transformers, and their errors are understandable to a client."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.errors import InvalidRequest
from baton_text.artifacts import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    ArtifactError,
    read_artifacts,
)
from baton_text.chat import ChatTemplate
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import CHATML, byte_level_artifacts, write_artifacts

Ours = Callable[[Path], Tokenizer]

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief <&> \"quoted\" 'so'."},
    {"role": "user", "content": "Gr\u00fc\u00dfe \u65e5\u672c \U0001f600"},
    {"role": "assistant", "content": "Hi", "tool_calls": None},
    {"role": "user", "content": "What now?"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter f\u00fcr <Ort>",
            "parameters": {"type": "object", "properties": {"b": {}, "a": {"type": "string"}}},
        },
    }
]
TEMPLATES = {
    "chatml": CHATML,
    "names": "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ unk_token }}"
    "|{{ documents is none }}|{{ tools is none }}|{{ add_generation_prompt }}",
    "tojson": "{{ messages | tojson }}\n{{ tools | tojson(indent=2) }}"
    "{{ {'z': 1, 'a': '\u00fc'} | tojson(sort_keys=true, ensure_ascii=true) }}"
    "{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if loop.last %}{% break %}{% endif %}{{ m.role }},{% endfor %}",
    "whitespace": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n"
    "    {% endif %}\n{%- endfor %}\n  end\n",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ dict(a=1) }}{{ range(3) | list }}",
    "kwargs": "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
    "{{ level | default('none') }}{{ messages[0]['content'].strip().split(' ')[0] }}",
    "keys": "{% for m in messages %}{{ m | length }}{{ 'tool_calls' in m }}"
    "{{ m.get('name', '-') }}{% for k, v in m.items() %}{{ k }}{% endfor %}{% endfor %}",
    "macro": "{% macro say(m) %}[{{ m.role | upper }}] {{ m.content | trim }}{% endmacro %}"
    "{% for m in messages[1:] %}{{ say(m) }}{% endfor %}{{ messages[-1].content[:4] }}",
}


def both(
    folder: Path, hugging_face: Callable[[Path], Any], **kwargs: Any
) -> tuple[str, str, Callable[[str], list[int]], list[int]]:
    """(our text, their text, our encoder, their ids) for TALK."""
    artifacts = read_artifacts(folder)
    ours = ChatTemplate.from_artifacts(artifacts).render(TALK, **kwargs)
    tokenizer = hugging_face(folder)
    kwargs = {"add_generation_prompt": True, **kwargs}
    theirs = tokenizer.apply_chat_template(TALK, tokenize=False, **kwargs)
    ids = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True, **kwargs)
    ours_tokenizer = Tokenizer.from_artifacts(artifacts)
    return (
        ours,
        theirs,
        lambda text: ours_tokenizer.encode(text, add_special_tokens=False),
        ids["input_ids"],
    )


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_models_own_template_gives_transformers_text_and_ids(
    model_folder: Path, hugging_face: Callable[[Path], Any], add_generation_prompt: bool
) -> None:
    ours, theirs, encode, ids = both(
        model_folder, hugging_face, add_generation_prompt=add_generation_prompt
    )
    assert ours == theirs
    assert encode(ours) == ids


TRIMS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BEGUN = (
    "The answer is",
    "The answer is ",
    " led and trailed \n\n",
    "\u65e5\u672c \U0001f600",
    "Gr\u00fc\u00dfe <&>",
    "one\n\ntwo",
    "What now?",
    "Hi",
    "",
    "   ",
)


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("template", [CHATML, TRIMS], ids=["kept", "trimmed"])
def test_a_message_is_continued_as_in_transformers(
    tmp_path: Path,
    our_tokenizer: Ours,
    hugging_face: Callable[[Path], Any],
    template: str,
    begun: str,
) -> None:
    folder = write_artifacts(byte_level_artifacts(template), tmp_path)
    assert_continued_as_in_transformers(folder, our_tokenizer, hugging_face, begun)


@pytest.mark.parametrize("begun", BEGUN)
def test_a_models_own_template_continues_a_message_as_in_transformers(
    model_folder: Path, our_tokenizer: Ours, hugging_face: Callable[[Path], Any], begun: str
) -> None:
    assert_continued_as_in_transformers(model_folder, our_tokenizer, hugging_face, begun)


def assert_continued_as_in_transformers(
    folder: Path, our_tokenizer: Ours, hugging_face: Callable[[Path], Any], begun: str
) -> None:
    """For an assistant's message, and for a user's."""
    chat = ChatTemplate.from_artifacts(read_artifacts(folder))
    tokenizer = hugging_face(folder)
    for talk in (
        [*TALK, {"role": "assistant", "content": begun}],
        [*TALK[:-1], TALK[1] | {"content": begun}],
    ):
        ours = chat.render(talk, add_generation_prompt=False, continue_final_message=True)
        options: dict[str, Any] = {"continue_final_message": True, "return_dict": True}
        assert ours == tokenizer.apply_chat_template(
            talk, tokenize=False, continue_final_message=True
        )
        ids = tokenizer.apply_chat_template(talk, tokenize=True, **options)["input_ids"]
        assert our_tokenizer(folder).encode(ours, add_special_tokens=False) == ids
        assert ours.rstrip().endswith(begun.strip())


@pytest.mark.parametrize(
    ("template", "last"),
    [
        ("{{ messages[0].content }}", "Hi"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "Hi"),
        ("{% for m in messages %}{{ m.content.split('>')[-1] }}{% endfor %}", "a > b"),
        (CHATML, None),
    ],
)
def test_a_message_that_the_template_changes_cannot_be_continued_nor_in_transformers(
    tmp_path: Path, hugging_face: Callable[[Path], Any], template: str, last: str | None
) -> None:
    folder = write_artifacts(byte_level_artifacts(template), tmp_path)
    talk = [*TALK, {"role": "assistant", "content": last}]
    chat = ChatTemplate.from_artifacts(read_artifacts(folder))
    with pytest.raises(InvalidRequest, match="go on with it") as caught:
        chat.render(talk, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(ValueError, match="continue_final_message"):
        hugging_face(folder).apply_chat_template(talk, continue_final_message=True, tokenize=False)


@pytest.mark.parametrize("kwargs", [{}, {"tools": TOOLS, "enable_thinking": False, "level": 3}])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_template_features_render_as_in_transformers(
    tmp_path: Path,
    hugging_face: Callable[[Path], Any],
    template: str,
    kwargs: dict[str, Any],
) -> None:
    folder = write_artifacts(byte_level_artifacts(template), tmp_path)
    ours, theirs, encode, ids = both(folder, hugging_face, **kwargs)
    assert ours == theirs
    assert encode(ours) == ids


def test_strftime_now_tells_the_time_it_is_given() -> None:
    artifacts = byte_level_artifacts("{{ strftime_now('%Y-%m-%d') }}")
    template = ChatTemplate.from_artifacts(artifacts, now=lambda: datetime(2031, 4, 5))
    assert template.render(TALK) == "2031-04-05"


def test_strftime_now_is_todays_date_as_in_transformers(
    tmp_path: Path, hugging_face: Callable[[Path], Any]
) -> None:
    folder = write_artifacts(byte_level_artifacts("{{ strftime_now('%Y %B') }}"), tmp_path)
    ours, theirs, _, _ = both(folder, hugging_face)
    assert ours == theirs


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("where", ["tokenizer_config", "files"])
def test_named_templates_are_chosen_as_in_transformers(
    tmp_path: Path,
    hugging_face: Callable[[Path], Any],
    where: str,
    tools: list[dict[str, Any]] | None,
) -> None:
    artifacts = byte_level_artifacts("plain {{ messages[0].role }}")
    if where == "files":
        artifacts["additional_chat_templates/tool_use.jinja"] = b"tools {{ tools | length }}"
    else:
        config = json.loads(artifacts[TOKENIZER_CONFIG])
        config["chat_template"] = [
            {"name": "default", "template": artifacts.pop(CHAT_TEMPLATE).decode()},
            {"name": "tool_use", "template": "tools {{ tools | length }}"},
        ]
        artifacts[TOKENIZER_CONFIG] = json.dumps(config).encode()
    ours, theirs, _, _ = both(write_artifacts(artifacts, tmp_path), hugging_face, tools=tools)
    assert ours == theirs


def test_the_template_file_overrides_tokenizer_config(
    tmp_path: Path, hugging_face: Callable[[Path], Any]
) -> None:
    artifacts = byte_level_artifacts("from the file")
    config = json.loads(artifacts[TOKENIZER_CONFIG])
    artifacts[TOKENIZER_CONFIG] = json.dumps({**config, "chat_template": "configured"}).encode()
    ours, theirs, _, _ = both(write_artifacts(artifacts, tmp_path), hugging_face)
    assert ours == theirs == "from the file"


@pytest.mark.parametrize("listed", [True, False])
def test_special_tokens_may_be_objects_or_stand_in_their_own_file_as_in_transformers(
    tmp_path: Path, hugging_face: Callable[[Path], Any], listed: bool
) -> None:
    artifacts = byte_level_artifacts("{{ bos_token }}{{ eos_token }}{{ cls_token }}")
    config = json.loads(artifacts[TOKENIZER_CONFIG])
    config["bos_token"] = {"__type": "AddedToken", "content": "<s>", "special": True}
    if listed:
        config["added_tokens_decoder"] = {"0": {"content": "<s>", "special": True}}
    artifacts[TOKENIZER_CONFIG] = json.dumps(config).encode()
    artifacts[SPECIAL_TOKENS_MAP] = b'{"cls_token": {"content": "<|user|>"}, "eos_token": "<s>"}'
    ours, theirs, _, _ = both(write_artifacts(artifacts, tmp_path), hugging_face)
    assert ours == theirs


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages[99].content.strip() }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{{ strftime_now.__globals__['x'] }}", "refuses these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses these messages"),
    ],
)
def test_a_template_that_refuses_is_the_clients_error(template: str, message: str) -> None:
    chat = ChatTemplate.from_artifacts(byte_level_artifacts(template))
    with pytest.raises(InvalidRequest, match=message) as caught:
        chat.render(TALK)
    assert caught.value.param == "messages"


def test_a_model_without_template_says_what_to_do() -> None:
    artifacts = byte_level_artifacts()
    del artifacts[CHAT_TEMPLATE]
    with pytest.raises(InvalidRequest, match="--chat-template"):
        ChatTemplate.from_artifacts(artifacts).render(TALK)


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages is empty"):
        ChatTemplate.from_artifacts(byte_level_artifacts()).render([])


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_a_client_cannot_set_reserved_arguments(name: str) -> None:
    chat = ChatTemplate.from_artifacts(byte_level_artifacts())
    from_the_client: dict[str, Any] = {name: "x"}
    with pytest.raises(InvalidRequest, match=name) as caught:
        chat.render(TALK, **from_the_client)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["self", "args", "kwargs", "context", "a b", ""])
def test_a_client_may_give_its_template_arguments_any_name(name: str) -> None:
    chat = ChatTemplate.from_artifacts(byte_level_artifacts("{{ messages[0].content }}"))
    from_the_client: dict[str, Any] = {name: 1}
    assert chat.render([{"role": "user", "content": "x"}], **from_the_client) == "x"


def test_a_template_with_a_syntax_error_is_named_at_the_start() -> None:
    with pytest.raises(ArtifactError, match="'default', line 2"):
        ChatTemplate.from_artifacts(byte_level_artifacts("a\n{% if %}"))


def test_rendering_does_not_modify_the_messages() -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    ChatTemplate.from_artifacts(byte_level_artifacts()).render(messages)
    assert messages == [{"role": "user", "content": "x", "name": None}]
