"""keep_freed_memory() keeps freed memory in the process, so later steps cause few page faults. The
test runs in a new process, because the setting of malloc cannot be undone."""

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


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's malloc")
def test_freed_memory_is_not_returned_to_the_kernel() -> None:
    command = [sys.executable, "-c", FAULTS]
    kept, faults = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.split()
    assert kept == "True"
    assert int(faults) < 36_000  # a tenth of the pages of 20 rounds
