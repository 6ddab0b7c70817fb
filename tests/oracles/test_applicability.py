"""The lists in applicability.py agree with each other and with the tests of this folder."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from tests.oracles.applicability import DIFFERENCES, NOT_APPLICABLE, REFERENCE, TESTED

EXCLUDED = [id for ids, _ in NOT_APPLICABLE for id in ids]
# Number of oracles per section, to detect accidental changes of REFERENCE.
SIZES = {"MEM": 33, "XFR": 5, "PRF": 7, "BLK": 15, "PFX": 11, "SCH": 20, "REQ": 11, "OUT": 10} | {
    "TOK": 4,
    "SMP": 22,
    "MDL": 22,
    "SPD": 13,
    "QNT": 6,
    "DST": 11,
    "NAN": 6,
}


def ids_in_test_names() -> set[str]:
    """Ids in the names of the test functions of this folder."""
    ids: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not node.name.startswith("test_"):
                    continue
                parts = re.findall(r"_O_([A-Z]{3})_(\d+[a-z]?)(?=_|$)", node.name)
                ids.update(f"O-{section}-{number}" for section, number in parts)
    return ids


def test_each_section_of_the_reference_has_its_number_of_oracles() -> None:
    assert Counter(id.split("-")[1] for id in set(REFERENCE)) == SIZES
    assert len(REFERENCE) == sum(SIZES.values()) == 196


def test_each_oracle_is_either_tested_or_not_applicable_once() -> None:
    assert Counter([*TESTED, *EXCLUDED]) == Counter(REFERENCE)


def test_exactly_the_tested_oracles_are_in_test_names() -> None:
    assert ids_in_test_names() == set(TESTED)


def test_each_exclusion_and_difference_has_a_reason() -> None:
    assert all(len(reason) > 15 for _, reason in NOT_APPLICABLE)
    assert all(len(reason) > 15 for reason in DIFFERENCES.values())
    assert set(DIFFERENCES) <= set(TESTED)
