"""The regular expressions of layer names that checkpoints write in several ways. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from baton_engine.config.config_json import shown
from baton_engine.errors import ModelError

ANY = ".*"
HEAD = "lm_head"
# Routers and the gate of a shared MLP. Tools leave them as they are, and configs do not say so.
ROUTERS = rf"{ANY}[.](?:gate|router|shared_expert_gate)"
# Prefix of a regular expression among names, as compressed-tensors writes it.
REGEX = "re:"
MOST_PATTERN = 1000  # characters


def name_patterns(names: Iterable[str], key: str) -> tuple[str, ...]:
    """Patterns of names that are a layer's, or begin with `re:` and match its beginning. `key` is
    the key of the names, for errors."""
    return tuple(_pattern(name, key) for name in names)


def part_patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Patterns of layers that have one of `names` anywhere in their name."""
    return tuple(f"{ANY}{re.escape(name)}{ANY}" for name in names)


def ending_patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Patterns of layers whose name ends with one of `names`."""
    return tuple(f"{ANY}{re.escape(name)}" for name in names)


def beginning_patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Patterns of layers whose name begins with one of `names`."""
    return tuple(f"{re.escape(name)}{ANY}" for name in names)


def module_patterns(names: Iterable[str], key: str) -> tuple[str, ...]:
    """Patterns of layers of which one of `names` is the end of the name, or a regular expression of
    the first modules in it. `key` is the key of the names, for errors."""
    patterns = []
    for name in names:
        patterns.append(f"{ANY}{re.escape(name)}")
        patterns.append(regular_expression(rf"(?:{name})(?:(?<=[.])|(?=[.]|$))", key))
    return tuple(patterns)


def _pattern(name: str, key: str) -> str:
    if not name.startswith(REGEX):
        return re.escape(name)
    return regular_expression(name.removeprefix(REGEX), key)


def regular_expression(pattern: str, key: str) -> str:
    """The pattern of layers of which `pattern` matches the beginning of the name. `key` is the
    pattern's key, for errors."""
    if len(pattern) > MOST_PATTERN:
        raise ModelError(
            f"config.json: {key} has a regular expression of {len(pattern)} characters; at most "
            f"{MOST_PATTERN} are allowed"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(
            f"config.json: {key} {shown(pattern)} is no regular expression: {error}"
        ) from error
    return f"(?:{pattern}){ANY}"
