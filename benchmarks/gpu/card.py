"""What the card can do: the bounds that later shares refer to, and what the engine takes for
granted of torch.

In: the device. Out: its name and versions; bandwidths, the rate of products in bf16, the latency of
launches; and checks of torch's functions that the engine relies on. Every measurement is a ceiling
for later parts under its name.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import numpy as np
import torch
import triton

from baton_engine.kv.staging import stage
from baton_engine.layers.linear_method import PACKED_HEAD
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.names import COPY, GEMM, LAUNCH, REPLAY
from benchmarks.gpu.parts import CARD
from benchmarks.gpu.timing import eager_median, seconds_per_call

GB, TERA = 1e9, 1e12
COPY_BYTES, TRANSFER_BYTES = 4 << 30, 256 << 20
SIDE = 8192  # of the square matrices, enough to fill a card
LAUNCHES = 1000
TRANSFERS = 4
DRY_BYTES, DRY_SIDE, DRY_LAUNCHES = 1 << 20, 64, 10
# Of a head with 2,048 inputs; the sums are in float32.
HEAD_SHAPE = 4096, 2048
HEAD_TOLERANCE = 1e-4


def run(findings: Findings) -> None:
    device = findings.device
    with findings.attempt(CARD):
        describe(findings)
    with findings.attempt(COPY):
        size = DRY_BYTES if findings.dry else COPY_BYTES
        source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        took = eager_median(lambda: target.copy_(source), device)
        findings.measured(
            COPY, 2 * size / took / GB, "GB/s", note="device to device; read + written"
        )
    for name, to_device in (("host to device", True), ("device to host", False)):
        with findings.attempt(name):
            findings.measured(name, transfer(findings, to_device=to_device), "GB/s", note="pinned")
    with findings.attempt(GEMM):
        measure_products(findings)
    with findings.attempt(LAUNCH):
        measure_launches(findings)
    for rows in (1, 256):
        with findings.attempt(f"float32 logits of {rows} rows"):
            check_head(findings, rows)
    with findings.attempt("staging"):
        check_staging(findings)


def describe(findings: Findings) -> None:
    findings.noted("python", platform.python_version())
    findings.noted("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    findings.noted("triton", triton.__version__)
    if findings.device.type == "cpu":
        findings.noted(CARD, "dry")
        findings.measured("cores of the host", os.cpu_count() or 0, "")
        return
    properties = torch.cuda.get_device_properties(findings.device)
    findings.noted(CARD, properties.name)
    driver = Path("/proc/driver/nvidia/version")
    findings.noted("driver", driver.read_text().splitlines()[0] if driver.exists() else "unknown")
    free, total = torch.cuda.mem_get_info(findings.device)
    findings.measured("memory", total / 2**30, "GiB", note=f"{free / 2**30:.1f} GiB free")
    findings.measured("multiprocessors", properties.multi_processor_count, "")
    findings.measured("L2 cache", properties.L2_cache_size / 2**20, "MiB")
    findings.measured("cores of the host", os.cpu_count() or 0, "")


def transfer(findings: Findings, *, to_device: bool) -> float:
    """GB/s between pinned memory and the device."""
    size, on_card = (DRY_BYTES, False) if findings.dry else (TRANSFER_BYTES, True)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=on_card)
    there = torch.empty(size, dtype=torch.uint8, device=findings.device)
    source, target = (host, there) if to_device else (there, host)

    def work() -> None:
        for _ in range(TRANSFERS):
            target.copy_(source, non_blocking=True)

    return TRANSFERS * size / eager_median(work, findings.device) / GB


def measure_products(findings: Findings) -> None:
    side = DRY_SIDE if findings.dry else SIDE
    dtype = torch.float32 if findings.dry else torch.bfloat16
    left, right = (torch.randn(side, side, device=findings.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    took = eager_median(lambda: torch.mm(left, right, out=out), findings.device)
    note = f"{side} x {side} x {side}, {str(dtype).removeprefix('torch.')}"
    findings.measured(GEMM, 2 * side**3 / took / TERA, "TFLOP/s", note=note)


def measure_launches(findings: Findings) -> None:
    """The host's time for a small kernel of torch, and the device's for one of a graph that depends
    on the one before."""
    count = DRY_LAUNCHES if findings.dry else LAUNCHES
    number = torch.zeros(1, device=findings.device)

    def work() -> None:
        for _ in range(count):
            number.add_(1)

    work()
    began = time.perf_counter()
    work()
    findings.measured(LAUNCH, (time.perf_counter() - began) / count * 1e6, "us")
    took = seconds_per_call(work, findings.device)
    findings.measured(REPLAY, took / count * 1e6, "us", note="dependent kernels of a graph")


def check_head(findings: Findings, rows: int) -> None:
    """The product of the head gives float32 sums of 16-bit weights."""
    outputs, inputs = (128, 64) if findings.dry else HEAD_SHAPE
    weight = torch.randn(outputs, inputs, device=findings.device).bfloat16()
    x = torch.randn(rows, inputs, device=findings.device).bfloat16()
    actual = PACKED_HEAD.product(weight, None)(x)
    expected = x.double() @ weight.double().T
    worst = float((actual - expected).abs().max() / expected.abs().max())
    passed = actual.dtype == torch.float32 and worst < HEAD_TOLERANCE
    findings.checked(f"float32 logits of {rows} rows", passed, f"off by {worst:.1e} of the largest")


def check_staging(findings: Findings) -> None:
    """Small arrays reach the device unchanged, and come back into memory that copies can use while
    the host goes on."""
    array = np.arange(1000, dtype=np.int32)
    there = stage(array, findings.device)
    back = there.to("cpu", non_blocking=True)
    if findings.device.type == "cuda":
        torch.cuda.synchronize()
        pinned = back.is_pinned()
        findings.checked("copies to the host are asynchronous", pinned, f"pinned: {pinned}")
    same = bool(np.array_equal(back.numpy(), array))
    findings.checked("staged arrays are unchanged", same)
