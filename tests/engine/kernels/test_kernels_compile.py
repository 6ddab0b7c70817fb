"""Kernels compile, and fit a GPU's registers and shared memory. The interpreter shows neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines.kernel_compiler import ARCHITECTURES

pytestmark = pytest.mark.integration

# The least shared memory that a program can use on a GPU since Ampere.
SHARED_BYTES = 99 << 10
# ptxas stores a few values of a thread in memory where that lets another program run beside it. A
# tile that is too large takes hundreds of bytes.
SPILLED_BYTES = 64
MOST_REGISTERS = 255
KERNELS = {
    *("_activation_mul", "_add_norm", "_attend", "_draw", "_join", "_matmul", "_pick"),
    *("_rotate_store", "_shape", "_store_kv"),
}


@pytest.mark.parametrize(
    "options", [["--quick"], pytest.param([], marks=pytest.mark.long)], ids=["quick", "all"]
)
def test_kernels_compile_with_the_arguments_of_launches_and_fit_gpus(
    options: list[str], tmp_path: Path
) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engines.kernel_compiler", "--json", *options],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {each["kernel"] for each in found} == KERNELS
    assert {each["arch"] for each in found} == set(ARCHITECTURES)
    too_large = [
        each
        for each in found
        if each["registers"] > MOST_REGISTERS
        or each["spills"] > SPILLED_BYTES
        or each["shared"] > SHARED_BYTES
    ]
    assert not too_large
