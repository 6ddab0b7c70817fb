"""Freed memory stays with the process: few pages are touched anew. In a process of its own, since
malloc is told for good."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

FAULTS = """
import resource, torch
from baton_engine.memory.malloc import keep_freed_memory

def faults(rounds):
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        ones = torch.ones(6 << 20)  # 24 MiB
        twos = ones * 2
        threes = twos + 1
        del ones, twos, threes
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

kept = keep_freed_memory()
faults(3)
print(kept, faults(20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc is glibc's on Linux alone")
def test_freed_memory_is_not_given_back() -> None:
    command = [sys.executable, "-c", FAULTS]
    told, faults = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.split()
    assert told == "True"
    assert int(faults) < 36_000  # a tenth of the pages of 20 rounds
