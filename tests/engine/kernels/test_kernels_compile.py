"""Kernels compile and fit a GPU's shared memory. The interpreter shows neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

# The least shared memory that a program can use on a GPU since Ampere.
SHARED_BYTES = 99 << 10


def test_kernels_compile_and_fit_the_shared_memory_of_gpus(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engines.kernel_compiler"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shared_bytes = json.loads(done.stdout)  # by kernel
    assert len(shared_bytes) == 17
    assert {name: size for name, size in shared_bytes.items() if size > SHARED_BYTES} == {}
