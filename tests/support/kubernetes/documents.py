"""Commands and samples of docs/kubernetes.md, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
POOLS = sorted((ROOT / "docs" / "pools").glob("*.yaml"))
_TEXT = (ROOT / "docs" / "kubernetes.md").read_text()
_HEADING = re.compile(r"^##+ (.*)$", re.MULTILINE)
_FENCED = r"^```{}\n(.*?)^```$"


def cluster_commands() -> list[tuple[str, str]]:
    """The blocks fenced as "sh cluster", in order, as pairs of (heading, block)."""
    return [
        (_HEADING.findall(_TEXT[: match.start()])[-1], match[1])
        for match in re.finditer(_FENCED.format("sh cluster"), _TEXT, re.MULTILINE | re.DOTALL)
    ]


def commands_of(block: str) -> list[str]:
    """Split a block into commands, with continued lines joined."""
    return re.sub(r"\\\n\s*", "", block).splitlines()


def excerpts() -> list[dict[str, Any]]:
    """The pool specs in the text's YAML blocks."""
    fenced = re.compile(_FENCED.format("yaml"), re.MULTILINE | re.DOTALL)
    return [yaml.safe_load(block)["spec"] for block in fenced.findall(_TEXT)]
