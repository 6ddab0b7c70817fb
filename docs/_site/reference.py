"""Pages that are generated from the code: flags of the commands, fields of the resources.

    python docs/_site/reference.py      writes docs/reference/flags.md and fields.md

In: the options of `baton_cli`, the schemas of `baton_operator`. Out: `pages`, Markdown by path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from baton_cli.main import COMMANDS
from baton_cli.options.flag import Flag, flags_of
from baton_operator.api.crd import crd, scaler_crd

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
WRITTEN = "Written by `python docs/_site/reference.py`; do not edit."
FLAGS_HEAD = f"""# Flags

{WRITTEN} Every flag except a command's arguments also has an environment variable; see
[flags and variables](../operations/run.md#flags-and-variables).
"""
FIELDS_HEAD = f"""# Fields of the resources

{WRITTEN} `kubectl explain bpool.spec --recursive` shows the same for the installed version.
`[]` marks the items of a list.
"""


def pages() -> dict[Path, str]:
    return {REFERENCE / "flags.md": _flags(), REFERENCE / "fields.md": _fields()}


def _flags() -> str:
    parts = [FLAGS_HEAD]
    for command in COMMANDS:
        parts.append(f"## baton {command.words}\n")
        shown = [flag for flag in flags_of(command.options) if not flag.hidden]
        for title, group in groupby(shown, key=lambda flag: flag.title):
            rows = "\n".join(_flag_row(flag) for flag in group)
            head = "| flag | default | meaning |\n|---|---|---|"
            parts.append(f"**{title}**\n\n{head}\n{rows}\n" if title else f"{head}\n{rows}\n")
    return "\n".join(parts)


def _flag_row(flag: Flag) -> str:
    default = "" if flag.default is None else flag.show(flag.default)
    return f"| `{flag.option}` | {_code(default)} | {_cell(flag.help)} |"


def _fields() -> str:
    parts = [FIELDS_HEAD]
    for definition in (crd(), scaler_crd()):
        [version] = definition["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        parts.append(f"## {definition['spec']['names']['kind']}\n")
        parts.append("| field of `spec` | type | default | meaning |\n|---|---|---|---|")
        parts += [_field_row(path, field) for path, field in _walk("", schema)]
        parts.append("")
    return "\n".join(parts)


def _walk(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below, field
        yield from _walk(below, field)
        yield from _walk(f"{below}[]", field.get("items", {}))


def _field_row(path: str, field: Mapping[str, Any]) -> str:
    kind = "integer or string" if field.get("x-kubernetes-int-or-string") else field.get("type", "")
    if "enum" in field:
        kind = ", ".join(f"`{value}`" for value in field["enum"])
    bounds = [
        f"{words} {field[key]}"
        for key, words in (("minimum", "at least"), ("maximum", "at most"))
        if key in field
    ]
    if bounds:
        kind = f"{kind}, {' and '.join(bounds)}"
    default = field.get("default")
    shown = "" if isinstance(default, dict | list) or default is None else str(default)
    if isinstance(default, bool):
        shown = str(default).lower()
    return f"| `{path}` | {kind} | {_code(shown)} | {_cell(field.get('description', ''))} |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    """One line, in which neither a bar nor an angle bracket means anything."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    REFERENCE.mkdir(exist_ok=True)
    for page, text in pages().items():
        page.write_text(text)
