"""docs/conditions.md describes the conditions, reasons, fields and events of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from baton_operator.api.status import PoolStatus
from baton_operator.state import pod_problem
from baton_operator.status import events
from baton_operator.status.condition_kinds import ConditionKind, ConditionReason
from baton_operator.status.conditions import KINDS, PARTS, POD_PROBLEMS, READY

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "conditions.md").read_text()
ROW = re.compile(r"^\| (?!-|condition|reason|field|event).*\|$", re.MULTILINE)
NAME = re.compile(r"`(\w+)`")


def section(title: str) -> str:
    """Return the text under a heading, up to the next one."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def rows(title: str) -> list[str]:
    return ROW.findall(section(title))


def kind_row(kind: ConditionKind) -> str:
    return f"| `{kind.name}` | {kind.meaning} | {kind.source} | {kind.absent} |"


def reason_row(reason: ConditionReason) -> str:
    return f"| `{reason.name}` | {reason.status} | {reason.meaning} | {reason.remedy} |"


def all_reasons() -> Iterator[ConditionReason]:
    for kind in KINDS:
        yield from kind.reasons


def test_every_condition_is_explained_and_no_other() -> None:
    assert rows("Conditions") == [kind_row(kind) for kind in KINDS]


def test_every_reason_is_explained_where_it_belongs_and_no_other() -> None:
    assert rows("Pods") == [reason_row(reason) for reason in POD_PROBLEMS]
    for kind in KINDS:
        own = [reason for reason in kind.reasons if reason not in POD_PROBLEMS]
        assert rows(kind.name) == [reason_row(reason) for reason in own], kind.name
        of_pods = [reason for reason in kind.reasons if reason in POD_PROBLEMS]
        text = section(kind.name)
        assert ("[pods](#pods)" in text) == bool(of_pods)
        if 0 < len(of_pods) < len(POD_PROBLEMS):
            assert all(f"`{reason.name}`" in text for reason in of_pods)


def test_a_reason_has_one_meaning_everywhere() -> None:
    by_name: dict[str, ConditionReason] = {}
    for reason in all_reasons():
        assert by_name.setdefault(reason.name, reason) == reason
        assert re.fullmatch(r"([A-Z][a-z]*)+", reason.name.replace("KV", "Kv"))


def test_the_page_lists_the_conditions_that_ready_combines() -> None:
    text = section("Conditions")
    paragraph = text[text.index("`Ready` is False when") :].split("\n\n", 1)[0]
    assert {kind.name for kind in PARTS} | {READY.name} == set(NAME.findall(paragraph))


def test_every_problem_that_a_pod_may_have_is_a_reason() -> None:
    documented = set(re.findall(r"^    (\w+) ", pod_problem.__doc__ or "", re.MULTILINE))
    # A Deployment reports these.
    of_workloads = {"PodsRefused", "StartOverdue"}
    assert documented == {reason.name for reason in POD_PROBLEMS} - of_workloads
    source = Path(pod_problem.__file__).read_text()
    assert documented == {name for name in documented if f'"{name}"' in source}


def test_every_field_of_the_status_is_explained() -> None:
    documented = {name for row in rows("Other fields of the status") for name in NAME.findall(row)}
    fields = {field.encode_name for field in msgspec.structs.fields(PoolStatus)}
    assert fields - documented == {"conditions"}


def test_every_event_is_explained_and_no_other() -> None:
    first_cells = [row.split("|")[1] for row in rows("Events")]
    documented = {name for cell in first_cells for name in NAME.findall(cell)}
    source = Path(events.__file__).read_text()
    written = set(re.findall(r'_normal\("(\w+)"|reason="(\w+)"', source))
    names = {name for pair in written for name in pair if name}
    refusals = {
        reason.name
        for kind in KINDS
        if kind.name in ("Valid", "Applied", "SoleOperator")
        for reason in kind.reasons
        if reason.status == "False"
    }
    assert documented == names | refusals
