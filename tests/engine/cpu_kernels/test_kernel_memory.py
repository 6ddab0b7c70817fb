"""Kernels use their memory until they end: glibc's checking allocator returns freed memory to the
system, where a later use ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKED = Path("/lib/x86_64-linux-gnu/libc_malloc_debug.so.0")
STEP = """
import torch
from baton_engine.attention.exact.backend import TorchAttention
from baton_engine.config.model_config import AttentionSpec
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout, keys_and_values
from tests.support.engines.attention_specs import batch_of

torch.set_num_threads(2)
fields = keys_and_values(2, 128, "float32")
layout = KVLayout.of_fields(fields, num_layers=1, block_size=16, chunk_blocks=1)
memory = TorchMemory(layout, 80, torch.device("cpu"))
memory.pool.zero_()
spec = AttentionSpec(num_heads=64, num_kv_heads=2, head_dim=128, scale=0.1)
rows = [Row([0], 1000, [BlockId(1 + index) for index in range(63)]) for _ in range(8)]
step = TorchAttention(memory, [spec]).begin(batch_of(rows, layout))
q_TNH, kv_TKH = torch.ones(8, 64, 128), torch.ones(8, 2, 128)
for _ in range(3):
    step.attend(0, q_TNH, kv_TKH, kv_TKH)
"""


@pytest.mark.integration
@pytest.mark.skipif(not CHECKED.exists(), reason=f"{CHECKED} of glibc is missing")
def test_attention_uses_no_freed_memory() -> None:
    checked = {"LD_PRELOAD": str(CHECKED), "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}
    subprocess.run([sys.executable, "-c", STEP], env=os.environ | checked, check=True, timeout=120)
