"""The node's flags choose the parsers of a model's answers, else the chat template does."""

from __future__ import annotations

import json

import pytest

from baton_text.artifacts import BATON, ArtifactError
from baton_text.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    parsers_artifact,
    parsers_of,
)

HERMES_TEMPLATE = '<tool_call>{"name": ..., "arguments": ...}</tool_call>'
BOTH_TEMPLATE = f"{HERMES_TEMPLATE}<think></think>"


@pytest.mark.parametrize(
    ("template", "flags", "names"),
    [
        ("", ("", ""), (None, None)),
        (HERMES_TEMPLATE, ("", ""), ("hermes", None)),
        (BOTH_TEMPLATE, ("", ""), ("hermes", "qwen3")),
        ("", ("hermes", ""), ("hermes", None)),
        ("", ("hermes", "deepseek_r1"), ("hermes", "deepseek_r1")),
        (BOTH_TEMPLATE, ("", "deepseek_r1"), ("hermes", "deepseek_r1")),
        (BOTH_TEMPLATE, ("none", ""), (None, "qwen3")),
        (BOTH_TEMPLATE, ("none", "none"), (None, None)),
    ],
)
def test_a_flag_overrides_the_template(
    template: str, flags: tuple[str, str], names: tuple[str | None, str | None]
) -> None:
    tools, reasoning = parsers_of(parsers_artifact(*flags), template)
    assert (tools and tools.name, reasoning and reasoning.name) == names


def test_without_flags_there_is_no_parsers_artifact() -> None:
    """Then a node of the previous version has the same artifacts."""
    assert parsers_artifact("", "") == {}
    assert json.loads(parsers_artifact("none", "")[BATON]) == {"tool_parser": "none"}


@pytest.mark.parametrize(
    ("flags", "kind", "there_are"),
    [
        (("nope", ""), "tool parser", TOOL_PARSERS),
        (("", "nope"), "reasoning parser", REASONING_PARSERS),
    ],
)
def test_the_error_for_an_unknown_name_lists_the_known_names(
    flags: tuple[str, str], kind: str, there_are: dict[str, object]
) -> None:
    with pytest.raises(ArtifactError) as refused:
        parsers_artifact(*flags)
    assert str(refused.value) == (
        f"no {kind} is named 'nope'; there are {', '.join(there_are)}, and none"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"tool_parser": "newer"}', "'newer'"),
        (b'{"reasoning_parser": 3}', "named 3"),
        (b'{"tool_parser": null}', "named None"),
        (b"[]", r"baton\.json holds a list"),
    ],
)
def test_an_invalid_parsers_artifact_is_an_artifact_error(data: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parsers_of({BATON: data}, "")
