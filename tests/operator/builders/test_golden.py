"""Each sample pool's manifests, word for word. After an intended change:

UPDATE_GOLDEN=1 pytest tests/operator/builders/test_golden.py    and read the diff
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import yaml

from baton_operator.builders import build_pool
from tests.support.kubernetes.manifests import GOLDEN, SAMPLES, sample_pool


def as_yaml(manifests: tuple[dict[str, Any], ...]) -> str:
    return yaml.safe_dump_all(manifests, sort_keys=False, width=100)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_pool_is_built_as_its_golden_file_says(name: str) -> None:
    built = as_yaml(build_pool(sample_pool(name)))
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(built)
    assert built == golden.read_text()


@pytest.mark.parametrize("name", SAMPLES)
def test_manifests_share_no_part_that_an_edit_of_one_would_change_in_another(name: str) -> None:
    # YAML writes what is shared as an anchor and its aliases.
    assert "&id" not in as_yaml(build_pool(sample_pool(name)))
