"""Render messages to prompt text with the model's chat template.

In: artifacts with templates (chat_template.jinja, additional_chat_templates, or chat_template in
tokenizer_config.json), then a client's messages. Out: the prompt text that transformers renders.
Messages that the template does not take are fitted to it first (`conversation`).

Templates come with the model and run in a sandbox that cannot modify its inputs. They see messages,
tools, documents, the special tokens by name and the client's `chat_template_kwargs`. A client
cannot supply a template.
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
from baton_text.conversation import INSTRUCTIONS, TemplateRules, failing_call, fit_messages

NO_TEMPLATE = (
    "the model has no chat template; start its nodes with --chat-template FILE, or use "
    "/v1/completions"
)
DEFAULT = "default"
WITH_TOOLS = "tool_use"
# For trial renderings of templates that are only used with tools.
_A_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}},
    },
}
# Arguments that the server sets; chat_template_kwargs must not override them.
RESERVED = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize"),
)
# Marks the end of the last message. Its trailing space shows whether the template trims.
_HERE = "CONTINUE_FINAL_MESSAGE_HERE "
# Exceptions from a template that does not support the messages.
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
    """The chat templates of one model. Threads can share it.

    templates   name -> compiled template
    sources     name -> its text; they show how the model writes calls and reasoning
    special     name -> text of the special tokens
    """

    def __init__(
        self,
        templates: Mapping[str, jinja2.Template],
        sources: Mapping[str, str],
        special: Mapping[str, str],
    ) -> None:
        self.source = "\n".join(sources.values())
        self._templates = dict(templates)
        self._special = dict(special)
        self._rules = {name: self._learned(name, text) for name, text in sources.items()}

    @classmethod
    def from_artifacts(
        cls,
        artifacts: Mapping[str, bytes],
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate:
        """Compile the templates. A model without a template fails only when `render` is called.

        `now` returns the time for `strftime_now`. Raises ArtifactError for a syntax error."""
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
        return cls(templates, sources, special_tokens(artifacts))

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
        """Return the prompt text. Encode it without adding special tokens.

        With `continue_final_message`, the text ends with the last message's content, so that the
        model continues that message; do not combine it with `add_generation_prompt`. `kwargs` are
        the client's chat_template_kwargs. Raises InvalidRequest if the template refuses the
        messages, if there is no template, or if the last message cannot be continued.
        """
        for name in RESERVED:
            if name in kwargs:
                raise InvalidRequest(
                    f"chat_template_kwargs holds {name!r}, which is not the client's to set",
                    param="chat_template_kwargs",
                )
        if not messages:
            raise InvalidRequest("messages is empty", param="messages")
        values = {
            "documents": None,
            **self._special,
            **kwargs,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        name = self._choose(tools)
        shown = self._fitted(name, messages)
        final = shown[-1].get("content")
        if continue_final_message:
            if not isinstance(final, str):
                raise _not_continued("the last message has no text")
            if not _stays_last(messages, shown):
                raise _not_continued("the model's chat template takes no instruction at the end")
            shown[-1]["content"] = final + _HERE
        try:
            text = self._rendered(name, shown, values)
        except _TEMPLATE_FAULTS as error:
            raise self._refusal(error, name, messages, values) from error
        return _cut_after(str(final), text) if continue_final_message else text

    def _learned(self, name: str, source: str) -> TemplateRules:
        values: dict[str, Any] = {
            "documents": None,
            **self._special,
            "tools": [_A_TOOL] if name == WITH_TOOLS else None,
            "add_generation_prompt": False,
        }

        def render(messages: Sequence[Mapping[str, Any]]) -> str | None:
            try:
                return self._rendered(name, messages, values)
            except _TEMPLATE_FAULTS:
                return None

        return TemplateRules.of(render, source)

    def _rendered(
        self, name: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
    ) -> str:
        # Pass one dict: as a keyword, a client's "self" would clash with render()'s.
        return self._templates[name].render({**values, "messages": messages})

    def _fitted(self, name: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        # As in transformers, {"content": null} means a message without content.
        present = [{k: v for k, v in message.items() if v is not None} for message in messages]
        return fit_messages(present, self._rules[name])

    def _refusal(
        self,
        error: Exception,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any],
    ) -> InvalidRequest:
        def renders(changed: Sequence[Mapping[str, Any]]) -> bool:
            try:
                self._rendered(name, self._fitted(name, changed), values)
            except _TEMPLATE_FAULTS:
                return False
            return True

        call = failing_call(messages, renders)
        return InvalidRequest(
            f"the model's chat template refuses {call or 'these messages'}: {error}",
            param=call or "messages",
        )

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        name = WITH_TOOLS if tools is not None and WITH_TOOLS in self._templates else DEFAULT
        if name not in self._templates:
            raise InvalidRequest(NO_TEMPLATE, param="messages")
        return name


def _stays_last(messages: Sequence[Mapping[str, Any]], shown: Sequence[Mapping[str, Any]]) -> bool:
    """Whether fitting has left the last message at the end."""
    moves = messages[-1].get("role") in INSTRUCTIONS
    return not moves or len(shown) == 1 or shown[-1].get("role") in INSTRUCTIONS


def _cut_after(final: str, text: str) -> str:
    """The rendered text up to the mark after the last message's content, as in transformers.

    If the template trims the content, white space before the mark is dropped, too. Raise
    InvalidRequest if the template changes the content."""
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
    """Template name -> source. Template files override those in tokenizer_config.json."""
    templates: dict[str, str] = {}
    prefix = f"{MORE_TEMPLATES}/"
    for name, data in artifacts.items():
        if name == CHAT_TEMPLATE:
            templates[DEFAULT] = data.decode()
        elif name.startswith(prefix):
            templates[name.removeprefix(prefix).removesuffix(".jinja")] = data.decode()
    if templates:
        return templates
    configured = load_json(artifacts, TOKENIZER_CONFIG).get("chat_template")
    if isinstance(configured, str):
        return {DEFAULT: configured}
    if isinstance(configured, list):
        return dict(map(_named_template, configured))
    return {}


def _named_template(item: object) -> tuple[str, str]:
    name, template = (
        (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
    )
    if not isinstance(name, str) or not isinstance(template, str):
        raise ArtifactError(
            f"{TOKENIZER_CONFIG}: an item of chat_template has no name or no template"
        )
    return name, template


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """A jinja2 environment with the filters and globals that transformers provides."""

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
        # jinja2's tojson escapes HTML and non-ASCII characters, which models do not expect.
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
    """{% generation %}...{% endgeneration %} marks text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
