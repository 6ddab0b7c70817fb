"""The chart's README and the descriptions of its values match its values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "baton"
NAME = re.compile(r"`([a-z]\w+(?:\.\w+)+)`")


def described(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Each property that the schema itself names, with its description."""
    for name, value in schema.get("properties", {}).items():
        yield f"{path}{name}", value.get("description", "")
        yield from described(value, f"{path}{name}.")


def value_at(path: str) -> object:
    found: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in path.split("."):
        found = found[name]
    return found


def test_every_value_has_a_description_that_is_a_sentence() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    texts = dict(described(schema))
    assert len(texts) > 40
    assert {name for name, text in texts.items() if not re.fullmatch(r"[A-Z].*\.", text)} == set()


def test_the_readme_fits_on_a_screen_and_names_values_that_exist() -> None:
    text = (CHART / "README.md").read_text()
    assert len(text.splitlines()) <= 45
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    named = {name: default for names, default in rows for name in NAME.findall(names)}
    assert len(named) >= 10
    for name, default in named.items():
        value = value_at(name)
        if isinstance(value, bool | int):
            assert default.strip("`") == str(value).lower(), name
