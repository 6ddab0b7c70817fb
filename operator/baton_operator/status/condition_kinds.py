"""What a condition type and a reason of it are. `conditions` lists all of them."""

from __future__ import annotations

import msgspec

from baton_operator.api.status import Truth


class ConditionReason(msgspec.Struct, frozen=True, kw_only=True):
    """`waits`: the state is expected to pass without an intervention."""

    name: str
    status: Truth
    meaning: str
    remedy: str = "nothing"
    waits: bool = False


def true_reason(name: str, meaning: str, remedy: str = "nothing") -> ConditionReason:
    return ConditionReason(name=name, status="True", meaning=meaning, remedy=remedy)


def wait_reason(name: str, meaning: str, remedy: str, status: Truth = "False") -> ConditionReason:
    return ConditionReason(name=name, status=status, meaning=meaning, remedy=remedy, waits=True)


def false_reason(name: str, meaning: str, remedy: str) -> ConditionReason:
    return ConditionReason(name=name, status="False", meaning=meaning, remedy=remedy)


def unknown_reason(name: str, meaning: str, remedy: str) -> ConditionReason:
    return ConditionReason(name=name, status="Unknown", meaning=meaning, remedy=remedy)


class ConditionKind(msgspec.Struct, frozen=True, kw_only=True):
    """A condition type. `source`: the data from which it is derived."""

    name: str
    meaning: str
    source: str
    absent: str = "as long as no valid spec was seen"
    reasons: tuple[ConditionReason, ...]
