"""Each Triton kernel of the engine beside its torch twin, as a part of `make gpu`.

In: the rows of `kernel_rows`. Out, per row: whether the results are right on fresh random data,
with memory that nobody has written full of NaN; the time, with cold caches; its share of the bound,
which is the longer of the bytes at the copy bandwidth and the operations at the rate of bf16
products; the registers and spills per thread of each kernel that ran; and the twin's time.

On a card, kernels are compiled first, by several processes at once: one after the other they would
take half of the part's time. A row that hangs or takes down the process is lost alone: another
process goes on behind it.

    python -m benchmarks.gpu.kernels --compile 3/8     the third of eight processes that compile
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.kernel_rows import ROWS, KernelRow, Setup, Tensors, Trial
from benchmarks.gpu.names import COPY, GEMM
from benchmarks.gpu.processes import ROOT
from benchmarks.gpu.timing import cold_seconds_per_call, eager_median

COMPILERS, COMPILE_S = 8, 60.0
COMPILED = "compiled"
# After this a row hangs; triton's interpreter needs longer.
ROW_S, DRY_ROW_S = 20.0, 300.0
# A row is not begun with less time.
LEAST_S = 3.0


def run(findings: Findings, rows: Sequence[KernelRow] = ROWS) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    findings.noted("seed", str(seed))
    on_card = not findings.dry
    if on_card and findings.first_try(COMPILED):
        with findings.attempt(COMPILED):
            compile_ahead(findings)
    for index, row in enumerate(rows):
        if findings.seconds_left < LEAST_S:
            findings.checked("all rows", False, f"no time for {len(rows) - index} rows")
            return
        if not findings.first_try(row.name):
            continue
        faulthandler.dump_traceback_later(ROW_S if on_card else DRY_ROW_S, exit=True)
        measured = False
        with findings.attempt(row.name):
            measure(findings, row)
            measured = True
        faulthandler.cancel_dump_traceback_later()
        if on_card and not measured:
            # An error of the device stays with this process; so does a recording that failed.
            sys.exit(f"{row.name} failed: go on in another process")


def measure(findings: Findings, row: KernelRow) -> None:
    trial = row.make(Setup(findings.device, findings.dry))
    with poisoned(), launched() as kernels:
        actual = trial.results()
        if findings.device.type == "cuda":
            torch.cuda.synchronize()
    problem = difference(actual, trial)
    findings.checked(row.name, not problem, problem)
    took = cold_seconds_per_call(trial.run, findings.device)
    notes = [registers(kernel) for kernel in kernels]
    if trial.twin is not None:
        timed = eager_median if trial.twin_waits else cold_seconds_per_call
        notes.append(f"torch {timed(trial.twin, findings.device) * 1e6:.1f} us")
    share, of = share_of_bound(trial, took, findings)
    note = "; ".join(dict.fromkeys(notes))
    findings.measured(row.name, took * 1e6, "us", share=share, of=of, note=note)


def share_of_bound(trial: Trial, took: float, findings: Findings) -> tuple[float | None, str]:
    """The longer of the two bounds as a share of the time; None if the card was not measured."""
    bounds = {
        COPY: trial.bytes / (findings.ceilings.get(COPY, 0.0) * 1e9 or float("inf")),
        GEMM: trial.operations / (findings.ceilings.get(GEMM, 0.0) * 1e12 or float("inf")),
    }
    of = max(bounds, key=lambda name: bounds[name])
    return (bounds[of] / took, of) if bounds[of] else (None, "")


def difference(actual: Tensors, trial: Trial) -> str:
    """How the results differ from what they should be, "" if they do not."""
    for index, (each, expected) in enumerate(zip(actual, trial.expected, strict=True)):
        right = expected.to(each.device).double()
        size = float(right.square().mean().sqrt())
        try:
            torch.testing.assert_close(
                each.double(), right, rtol=trial.tolerance, atol=trial.tolerance * size
            )
        except AssertionError as error:
            return f"result {index}: {' '.join(str(error).split())}"[:300]
    return ""


@contextmanager
def poisoned() -> Iterator[None]:
    """Make torch fill uninitialized allocations with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def launched() -> Iterator[list[Any]]:
    """The compiled kernels that are launched meanwhile. Triton's interpreter compiles none."""
    found: list[Any] = []
    launch = JITFunction.run

    def noting(self: Any, *arguments: Any, **options: Any) -> Any:
        kernel = launch(self, *arguments, **options)
        if kernel is not None:
            found.append(kernel)
        return kernel

    with mock.patch.object(JITFunction, "run", noting):
        yield found


def registers(kernel: Any) -> str:
    """Registers and spills per thread, and shared memory per program."""
    spills = f" + {kernel.n_spills} spilled" if kernel.n_spills else ""
    return f"{kernel.name}: {kernel.n_regs} registers{spills}, {kernel.metadata.shared} B shared"


def compile_ahead(findings: Findings) -> None:
    """Let each of several processes run its share of the rows once. Triton keeps what it compiles
    on the disk."""
    began = time.monotonic()
    end = began + min(COMPILE_S, findings.seconds_left / 2)
    command = [sys.executable, "-m", "benchmarks.gpu.kernels", "--compile"]
    compilers = [
        subprocess.Popen([*command, f"{number}/{COMPILERS}"], cwd=ROOT)
        for number in range(1, COMPILERS + 1)
    ]
    late = 0
    for each in compilers:
        try:
            each.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            each.kill()
            late += 1
    took = time.monotonic() - began
    note = f"{COMPILERS} processes" + (f", {late} of them not in time" if late else "")
    findings.measured(COMPILED, took, "s", note=note)


def compile_share(number: int, processes: int) -> None:
    """Run every `processes`-th row; what a row gives is not looked at here."""
    setup = Setup(torch.device("cuda"), dry=False)
    for row in ROWS[number - 1 :: processes]:
        with suppress(RuntimeError):
            row.make(setup).run()
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", required=True, metavar="NUMBER/PROCESSES")
    number, processes = map(int, parser.parse_args().compile.split("/"))
    compile_share(number, processes)


if __name__ == "__main__":
    main()
