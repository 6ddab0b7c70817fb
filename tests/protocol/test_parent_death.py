"""Processes that die with their parents. How they die is tested where they are started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("ended", "status"), [(False, 0), (True, 1)])
def test_a_process_whose_parent_has_already_ended_does_not_start(ended: bool, status: int) -> None:
    """The parent in this test is the test process, which lives. Any other pid stands for a parent
    that has ended."""
    parent = os.getpid() + (1 if ended else 0)
    code = f"from baton_protocol.parent_death import die_with; die_with({parent})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == status
