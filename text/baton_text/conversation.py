"""Fit a conversation to what the model's chat template takes.

Clients send the same conversation to every model, but templates differ: some know no `developer`,
no second system message, or none at all; some walk a call's arguments, others print them. What a
template does not take, it refuses or silently leaves out. Trial renderings of short conversations
show once per template what it takes.

In: a function that renders messages, and the template's source. Out: TemplateRules, and with them
messages that the template takes. As in templates, a message is a mapping with `role` and `content`
(a text, or a list of parts). Messages that come in are not modified.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
# Renders messages; None if the template refuses them.
Render = Callable[[Sequence[Message]], str | None]

SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL = "system", "developer", "user", "assistant", "tool"
INSTRUCTIONS = (SYSTEM, DEVELOPER)
# Holds a call's arguments that are not the text of a JSON object.
RAW_ARGUMENTS = "raw_arguments"
BETWEEN = "\n\n"  # between the texts of merged messages
_DEVELOPER = re.compile(r"""['"]developer['"]""")
# Places of an instruction that is not the first message.
_LATE = (
    (USER, "", ASSISTANT, USER),
    (USER, ASSISTANT, "", USER),
    (USER, ""),
)
# Digits, because templates may change letters. None contains another.
_FIRST_MARK = 73_105_200


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRules:
    """What a chat template takes. The defaults are those of a template that takes everything.

    leading     roles of INSTRUCTIONS that it shows at the beginning; others are renamed to `system`
    late        those that it shows between and after other messages
    pairs       it shows both, if a system and a developer message follow each other
    default     it adds a system prompt of its own if there is none at the beginning
    repeats     it shows two user messages in a row
    text        it takes a call's arguments as text, not as a mapping
    """

    leading: frozenset[str] = frozenset({SYSTEM})
    late: frozenset[str] = frozenset(INSTRUCTIONS)
    pairs: bool = True
    default: bool = False
    repeats: bool = True
    text: bool = False

    @classmethod
    def of(cls, render: Render, source: str) -> TemplateRules:
        """Learn the rules of a template. One that does not show the texts of a plain conversation
        tells nothing by trial, so its conversations keep their order."""
        named = _DEVELOPER.search(source) is not None
        text = _wants_text(render)
        roles = frozenset(INSTRUCTIONS if named else {SYSTEM})
        if not _shows(render, USER, ASSISTANT, USER):
            return cls(leading=roles, text=text)
        leading = frozenset(role for role in roles if _shows(render, role, USER, ASSISTANT, USER))
        return cls(
            leading=leading,
            late=frozenset(role for role in leading if _shows_late(render, role)),
            pairs=leading == set(INSTRUCTIONS)
            and _shows(render, SYSTEM, DEVELOPER, USER)
            and _shows(render, DEVELOPER, SYSTEM, USER),
            default=_has_default(render),
            repeats=_shows(render, USER, USER),
            text=text,
        )


# --- trial renderings -----------------------------------------------------------------------------


def _mark(position: int) -> str:
    return str(_FIRST_MARK + position)


def _shows(render: Render, *roles: str) -> bool:
    """Whether the template shows the text of each of these messages, wherever it does: some put the
    system message before the last question."""
    marks = [_mark(position) for position in range(len(roles))]
    text = render(
        [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    )
    return text is not None and all(mark in text for mark in marks)


def _shows_late(render: Render, role: str) -> bool:
    return all(_shows(render, role, *(one or role for one in roles)) for roles in _LATE)


def _has_default(render: Render) -> bool:
    """Whether text stands in the place of a missing system message."""
    user = {"role": USER, "content": _mark(1)}
    given, alone = render([{"role": SYSTEM, "content": _mark(0)}, user]), render([user])
    if given is None or alone is None:
        return False
    before, mark, rest = given.partition(_mark(0))
    between = rest.partition(_mark(1))[0]
    beginning = alone.partition(_mark(1))[0]
    if not mark or not beginning.startswith(before) or not beginning.endswith(between):
        return False
    return bool(beginning[len(before) : len(beginning) - len(between)].strip())


def _wants_text(render: Render) -> bool:
    """Whether the template needs a call's arguments as text: it refuses a mapping, or shows it as
    Python does, not as JSON."""
    arguments = {"value": _mark(0)}
    shown = render(_called(arguments))
    if shown is not None and str(arguments) not in shown:
        return False
    text = json.dumps(arguments)
    shown = render(_called(text))
    return shown is not None and text in shown


def _called(arguments: Any) -> list[Message]:
    """A call and its answer; the id has nine characters, as Mistral's templates demand."""
    call = {
        "id": "call12345",
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
    }
    return [
        {"role": USER, "content": "Hi"},
        {"role": ASSISTANT, "content": "", "tool_calls": [call]},
        {"role": TOOL, "name": "look", "tool_call_id": "call12345", "content": "so"},
    ]


# --- fitting --------------------------------------------------------------------------------------


def fit_messages(messages: Sequence[Message], rules: TemplateRules) -> list[dict[str, Any]]:
    """The messages as the template takes them.

    A role that it does not know becomes `system`. Instructions that follow each other are merged.
    A late one that the template does not take joins those at the beginning. If it takes none at
    all, they join the first user message."""
    fitting = [_fit_message(message, rules) for message in messages]
    begin = next(
        (place for place, other in enumerate(fitting) if other.get("role") not in INSTRUCTIONS),
        len(fitting),
    )
    first, moved, others = fitting[:begin], fitting[:0], fitting[:0]
    for message in fitting[begin:]:
        role = message.get("role")
        # Without a first instruction, the template would add its default beside this one.
        lacks = rules.default and not (first or moved)
        if role in INSTRUCTIONS and (role not in rules.late or lacks):
            moved.append(message)
        else:
            others.append(message)
    merged: list[dict[str, Any]] = []
    for message in (*first, *moved, *others):
        if merged and _merges(merged[-1].get("role"), message.get("role"), rules):
            merged[-1] = _join_messages(merged[-1], message)
        else:
            merged.append(message)
    return merged if rules.leading else _without_instruction(merged)


def _fit_message(message: Message, rules: TemplateRules) -> dict[str, Any]:
    changed = dict(message)
    role = message.get("role")
    if role in INSTRUCTIONS and role not in rules.leading:
        changed["role"] = DEVELOPER if DEVELOPER in rules.leading else SYSTEM
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_with_arguments(call, rules.text) for call in calls]
    return changed


def _merges(role: str | None, following: str | None, rules: TemplateRules) -> bool:
    if role in INSTRUCTIONS and following in INSTRUCTIONS:
        return role == following or not rules.pairs
    return role == following == USER and not rules.repeats


def _join_messages(message: dict[str, Any], following: Message) -> dict[str, Any]:
    """The message with the content of the one that follows it."""
    first, second = message.get("content") or "", following.get("content") or ""
    if not (first and second):
        return message | {"content": first or second}
    if isinstance(first, str) and isinstance(second, str):
        return message | {"content": first + BETWEEN + second}
    return message | {"content": [*_parts(first), *_parts(second)]}


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _without_instruction(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the instruction at their beginning as a part of the user's message."""
    if not messages or messages[0].get("role") not in INSTRUCTIONS:
        return messages
    instruction, *others = messages
    if others and others[0].get("role") == USER:
        content = _join_messages(instruction, others[0])["content"]
        return [others[0] | {"content": content}, *others[1:]]
    return [instruction | {"role": USER}, *others]


# --- calls ----------------------------------------------------------------------------------------


def _with_arguments(call: Any, text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    arguments = _as_text(given) if text else as_mapping(given)
    return {**call, "function": {**function, "arguments": arguments}}


def as_mapping(arguments: Any) -> Mapping[str, Any]:
    """A call's arguments as a mapping: an object, the text of one, or the text of such a text.

    Anything else is a value under RAW_ARGUMENTS, such as a text that was cut off."""
    if isinstance(arguments, Mapping):
        return arguments
    if arguments is None:
        return {}
    value = arguments
    for _ in range(2):
        if not isinstance(value, str):
            break
        if not value.strip():
            return {}
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            break
    if value is None:
        return {}
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: arguments}


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return json.dumps(as_mapping(arguments), ensure_ascii=False)


def failing_call(
    messages: Sequence[Message], renders: Callable[[Sequence[Message]], bool]
) -> str | None:
    """The path of the first call whose arguments the template does not take.

    `renders` tells whether the template takes messages; it does not take these. None if it takes
    them without any arguments neither, so that no call is the reason."""
    places = [
        (position, number)
        for position, message in enumerate(messages)
        for number in range(len(message.get("tool_calls") or ()))
    ]
    if not places or not renders(_emptied(messages, places)):
        return None
    taken, refused = 0, len(places)  # number of calls that keep their arguments
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if renders(_emptied(messages, places[middle:])):
            taken = middle
        else:
            refused = middle
    position, number = places[taken]
    return f"messages[{position}].tool_calls[{number}].function.arguments"


def _emptied(messages: Sequence[Message], places: Sequence[tuple[int, int]]) -> list[Message]:
    """The messages without the arguments of these calls."""
    chosen = set(places)
    emptied: list[Message] = []
    for position, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls:
            calls = [
                {**call, "function": {**call["function"], "arguments": {}}}
                if (position, number) in chosen and isinstance(call.get("function"), Mapping)
                else call
                for number, call in enumerate(calls)
            ]
            message = {**message, "tool_calls": calls}
        emptied.append(message)
    return emptied
