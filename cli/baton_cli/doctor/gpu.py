"""GPUs: whether the driver answers, and whether torch fits it."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host

CHECK = "gpu"
ASKED = "name,driver_version,memory.total"
QUERY = ("nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader")
QUERY_S = 4.0
DRIVER_LIBRARY = "libcuda.so.1"
DEVICE = "dev/nvidiactl"
_BUILT_FOR = re.compile(r"^cuda\b[^=]*= *'([\d.]+)'", re.MULTILINE)


def check_gpu(host: Host) -> Iterator[Finding]:
    if not (host.root / DEVICE).exists():
        yield Finding(check=CHECK, severity="ok", found="no NVIDIA GPU: engines run on the CPU")
        return
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"nvidia-smi does not answer: {error}",
            why="there is a GPU, and `baton up --device cuda` asks nvidia-smi for its memory",
            remedy="install the driver's utilities, or mount them (NVIDIA container toolkit)",
        )
        return
    for line in done.stdout.splitlines():
        name, driver, memory = (part.strip() for part in (*line.split(","), "", "")[:3])
        yield Finding(
            check=CHECK, severity="ok", found=f"{name}, {memory}, driver {driver or 'unknown'}"
        )
    yield from judge_torch(torch_cuda(), driver_cuda())


def torch_cuda() -> str | None:
    """The CUDA version that torch is built for: "" for none, None without torch. Read from its
    file: importing torch takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return ""
    match = _BUILT_FOR.search(text)
    return match[1] if match else ""


def driver_cuda() -> str | None:
    """The newest CUDA version that the driver runs, as 12.4; None without its library."""
    try:
        library = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def judge_torch(built: str | None, runs: str | None) -> Iterator[Finding]:
    """`built` and `runs` are as torch_cuda() and driver_cuda() return them. Within one major
    version, an older driver runs a newer CUDA (its minor version compatibility)."""
    if built is None:
        return  # `machine` says so
    if runs is None:
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"{DRIVER_LIBRARY} cannot be loaded",
            why="without the driver's library torch sees no GPU",
            remedy="install the NVIDIA driver, or start the container with --gpus all",
        )
    elif not built:
        yield Finding(
            check=CHECK,
            severity="warning",
            found="torch is built for CPUs only",
            why="--device cuda fails",
            remedy=f"install a torch that is built for CUDA {runs} or older",
        )
    elif int(built.split(".")[0]) > int(runs.split(".")[0]):
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"torch is built for CUDA {built}, and the driver runs at most {runs}",
            why="torch then sees no GPU",
            remedy=f"install a newer driver, or a torch that is built for CUDA {runs} or older",
        )
    else:
        yield Finding(
            check=CHECK,
            severity="ok",
            found=f"torch is built for CUDA {built}; the driver runs {runs}",
        )
