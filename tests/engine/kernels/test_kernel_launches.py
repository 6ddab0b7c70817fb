"""Kernels compile with the arguments of their launches. The interpreter does not compile them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SMALL_KERNELS = {*("_activation_mul", "_add_norm", "_draw", "_pick", "_rotate_store", "_shape")}


def test_kernels_compile_with_the_arguments_of_models_and_the_sampler(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engines.kernel_launches"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) >= SMALL_KERNELS
