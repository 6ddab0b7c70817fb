"""Messages to prompt text, by the model's own template.

In: artifacts with a template (chat_template.jinja, more of them beside it, or tokenizer_config's),
then messages as a client sent them. Out: the prompt's text, the same as transformers renders.

Templates come with the model and run in a sandbox that cannot change what it is given; they see
messages, tools, documents, the special tokens by name and what the client passes as
`chat_template_kwargs`. A client cannot bring a template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton_protocol.errors import InvalidRequest
from baton_text.artifacts import (
    CHAT_TEMPLATE,
    MORE_TEMPLATES,
    TOKENIZER_CONFIG,
    ArtifactError,
    load_json,
    special_tokens,
)

DEFAULT = "default"
WITH_TOOLS = "tool_use"
# Arguments of our own; a client's chat_template_kwargs must not stand in for them.
RESERVED = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize"),
)
# Marks where the last message's text ends. It ends with a space, to see whether a template trims.
_HERE = "CONTINUE_FINAL_MESSAGE_HERE "
# What a template written for other messages raises.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """The templates of one model: name -> compiled template. Safe to share between threads.
    `source` is the text of all of them, which shows how the model writes calls and reasoning."""

    def __init__(
        self,
        templates: Mapping[str, jinja2.Template],
        special: Mapping[str, str],
        source: str = "",
    ) -> None:
        self.source = source
        self._templates = dict(templates)
        self._special = dict(special)

    @classmethod
    def from_artifacts(
        cls,
        artifacts: Mapping[str, bytes],
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate:
        """A model without a template is fine until one is rendered. `now` is what `strftime_now`
        tells. Raises ArtifactError for a template with a syntax error."""
        environment = _environment(now)
        templates = {}
        sources = _sources(artifacts)
        for name, source in sources.items():
            try:
                templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ArtifactError(
                    f"chat template {name!r}, line {error.lineno}: {error.message}"
                ) from error
        return cls(templates, special_tokens(artifacts), "\n".join(sources.values()))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text; to be encoded without adding special tokens.

        With `continue_final_message` it ends where the last message's content ends, so that the
        model goes on with that message; there is then no `add_generation_prompt`. `kwargs` are the
        client's chat_template_kwargs. Raises InvalidRequest if the template refuses the messages or
        there is none.
        """
        for name in RESERVED:
            if name in kwargs:
                raise InvalidRequest(
                    f"chat_template_kwargs holds {name!r}, which is not the client's to set",
                    param="chat_template_kwargs",
                )
        if not messages:
            raise InvalidRequest("messages is empty", param="messages")
        # As transformers: {"content": null} is a message without content.
        present = [{k: v for k, v in each.items() if v is not None} for each in messages]
        final = present[-1].get("content")
        if continue_final_message:
            if not isinstance(final, str):
                raise _not_continued("the last message has no text")
            present[-1]["content"] = final + _HERE
        values = {
            "documents": None,
            **self._special,
            **kwargs,
            "messages": present,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # One dict: as keywords, a client's "self" would be render()'s own.
            text = self._choose(tools).render(values)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return _cut_after(str(final), text) if continue_final_message else text

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        name = WITH_TOOLS if tools is not None and WITH_TOOLS in self._templates else DEFAULT
        if name not in self._templates:
            raise InvalidRequest(
                "the model has no chat template; start its nodes with --chat-template FILE, "
                "or use /v1/completions",
                param="messages",
            )
        return self._templates[name]


def _cut_after(final: str, text: str) -> str:
    """The rendered text up to the mark behind the last message's content, as transformers cuts it:
    where the template trims the content, without white space before the mark."""
    at = text.rfind(_HERE.rstrip())
    if at < 0 or final.strip() not in text:
        raise _not_continued("the model's chat template does not show the last message as it is")
    return text[:at] if text.startswith(_HERE, at) else text[:at].rstrip()


def _not_continued(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"continue_final_message is true, but {why}, so nothing can go on with it",
        param="continue_final_message",
    )


def _sources(artifacts: Mapping[str, bytes]) -> dict[str, str]:
    """Template name -> source. Files beside the tokenizer win over tokenizer_config.json's."""
    found: dict[str, str] = {}
    prefix = f"{MORE_TEMPLATES}/"
    for name, data in artifacts.items():
        if name == CHAT_TEMPLATE:
            found[DEFAULT] = data.decode()
        elif name.startswith(prefix):
            found[name.removeprefix(prefix).removesuffix(".jinja")] = data.decode()
    if found:
        return found
    configured = load_json(artifacts, TOKENIZER_CONFIG).get("chat_template")
    if isinstance(configured, str):
        return {DEFAULT: configured}
    if isinstance(configured, list):
        return {entry["name"]: entry["template"] for entry in configured}
    return {}


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """jinja2 as transformers sets it up, so that templates see the names they expect."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own escapes HTML and non-ASCII characters; models were trained on neither.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks assistant text for training; here, a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
