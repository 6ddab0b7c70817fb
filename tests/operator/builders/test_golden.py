"""The manifests of each sample pool against its golden file. After an intended change:

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
def test_the_manifests_of_a_pool_equal_its_golden_file(name: str) -> None:
    built = as_yaml(build_pool(sample_pool(name)))
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(built)
    assert built == golden.read_text()


@pytest.mark.parametrize("name", SAMPLES)
def test_manifests_share_no_mutable_parts(name: str) -> None:
    # YAML writes a shared object as an anchor with aliases.
    assert "&id" not in as_yaml(build_pool(sample_pool(name)))
