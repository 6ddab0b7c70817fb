"""This machine: versions of packages, cores, kernels, memory, disk, huge pages, open files."""

from __future__ import annotations

import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from baton_cli.commands.version import DISTRIBUTION, NOT_INSTALLED, installed_version
from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host
from baton_cli.local_pool.machine import BF16_FLAGS, CPU_FLAG_KEYS, CPUINFO, cores, flags_in
from baton_cli.models.cache_folder import default_cache
from baton_cli.options.records import UpOptions
from baton_cli.options.sizes import about_size
from baton_engine.memory.host_memory import free_memory, read_groups
from baton_protocol import PROTOCOL_VERSION

CHECK = "machine"
SHOWN = ("torch", "triton", "numba", "transformers", "tokenizers", "redis", "aiohttp")
# What a router and a node import; the operator's packages matter only in a cluster.
EXTRAS = {"serve": "neither router nor node starts", "node": "only --engine sim runs here"}
LEAST_DISK = 1 << 30  # the demo model takes a third of it
# A router holds a file per connection of a client, and one per node.
LEAST_FILES = 512
MANY_FILES = 4096
NO_LIMIT = 1 << 60
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
_REQUIREMENT = re.compile(r"([\w.-]+)\s*>=\s*([\d.]+).*extra == ['\"](\w+)['\"]")


def check_machine(host: Host) -> Iterator[Finding]:
    yield from _packages()
    yield _cores()
    yield _kernels(flags_in(host.text(str(CPUINFO.relative_to("/")))))
    yield _memory(host)
    yield from _disk()
    yield from _huge_pages(host)
    yield _files()


def _packages() -> Iterator[Finding]:
    needed = list(_requirements())
    read = dict.fromkeys([*SHOWN, *(name for name, _, _ in needed)])
    versions = {name: installed_version(name) for name in read}
    shown = [f"{name} {versions[name]}" for name in SHOWN]
    yield Finding(
        check=CHECK,
        severity="ok",
        found=f"baton {installed_version(DISTRIBUTION)}, protocol {PROTOCOL_VERSION}, Python "
        f"{platform.python_version()}, {', '.join(shown)}",
    )
    missing: dict[str, list[str]] = {}
    for name, least, extra in needed:
        found = versions[name]
        if found == NOT_INSTALLED:
            missing.setdefault(extra, []).append(name)
        elif _numbers(found) < _numbers(least):
            yield Finding(
                check=CHECK,
                severity="error",
                found=f"{name} {found} is installed; {least} or newer is needed",
                why="a start may fail, or a request that uses it",
                remedy="install it in the checkout:",
                commands=(f"pip install '.[{extra}]'",),
            )
    for extra, names in missing.items():
        yield Finding(
            check=CHECK,
            severity="note",
            found=f"not installed: {', '.join(names)}",
            why=EXTRAS[extra],
            remedy="install them in the checkout:",
            commands=(f"pip install '.[{extra}]'",),
        )


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Name, least version and extra of each package that the extras of EXTRAS bring."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # run from a checkout's folders alone
        return
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match and match[3] in EXTRAS:
            yield match[1], match[2], match[3]


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 11, 0) of 2.11.0+cpu."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _cores() -> Finding:
    count = cores()
    return Finding(
        check=CHECK,
        severity="ok",
        found=f"{count} core{'s' * (count != 1)} for this process, by its affinity and CPU quota",
    )


def _kernels(flags: frozenset[str]) -> Finding:
    """Which instructions the kernels of a CPU engine use; see `baton_engine.cpu_kernels`."""
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16"}
    known |= {"amx_bf16": "AMX", "bf16": "BF16", "sve": "SVE"}
    has = [name for flag, name in known.items() if flag in flags]
    if not flags:
        return Finding(
            check=CHECK,
            severity="note",
            found=f"/proc/cpuinfo lists none of {', '.join(CPU_FLAG_KEYS)}",
            why="--dtype auto then computes in float32",
            remedy="give --dtype bfloat16 if the CPU computes in it",
        )
    dtype = "bfloat16" if flags & BF16_FLAGS else "float32"
    if platform.machine() == "x86_64" and "avx2" not in flags:
        return Finding(
            check=CHECK,
            severity="warning",
            found="the CPU has no AVX2",
            why="kernels compute 4 numbers at a time instead of 8 or 16",
            remedy="use a CPU from after 2013; of a virtual machine, pass the host's CPU through",
        )
    return Finding(
        check=CHECK,
        severity="ok",
        found=f"the CPU has {', '.join(has) or 'no wide vectors'}; --dtype auto computes in "
        f"{dtype}, unless the checkpoint is float32",
    )


def _memory(host: Host) -> Finding:
    free = free_memory(host.root)
    if free is None:
        return Finding(
            check=CHECK,
            severity="note",
            found="the free memory is unknown: /proc/meminfo has no MemAvailable",
            why="an engine then takes its default sizes",
            remedy="give --kv-memory",
        )
    # The first version of cgroups has a huge number where there is no limit.
    limits = [group.limit for group in read_groups(host.root) if group.limit < NO_LIMIT]
    limited = f", within a limit of {about_size(min(limits))}" if limits else ""
    store = UpOptions().store_memory
    if free < store:
        return Finding(
            check=CHECK,
            severity="warning",
            found=f"{about_size(free)} of memory are free{limited}",
            why=f"`baton up` starts a store of {about_size(store)} beside its engines",
            remedy="end other processes, raise the limit, or give --store-memory 256MiB",
        )
    return Finding(check=CHECK, severity="ok", found=f"{about_size(free)} are free{limited}")


def _disk() -> Iterator[Finding]:
    for name, folder in (("TMPDIR", tempfile.gettempdir()), ("XDG_CACHE_HOME", default_cache())):
        place = _existing(Path(folder))
        free = shutil.disk_usage(place).free
        short = free < LEAST_DISK
        yield Finding(
            check=CHECK,
            severity="warning" if short else "ok",
            found=f"{about_size(free)} of disk are free in {place}",
            why="models and the store's sockets need room there" if short else "",
            remedy=f"free some, or set {name} to another folder" if short else "",
        )


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _huge_pages(host: Host) -> Iterator[Finding]:
    chosen = re.search(r"\[(\w+)\]", host.text(HUGE_PAGES))
    if chosen is None:
        return  # a kernel without them
    if chosen[1] != "never":
        yield Finding(check=CHECK, severity="ok", found=f"huge pages: {chosen[1]}")
        return
    yield Finding(
        check=CHECK,
        severity="note",
        found="huge pages are off: never",
        why="a CPU reads large weights up to a fifth slower in small pages",
        remedy="let engines ask for them, as root:",
        commands=(f"echo madvise > /{HUGE_PAGES}",),
    )


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MANY_FILES:
        shown = "no limit" if soft == resource.RLIM_INFINITY else f"{soft}"
        return Finding(check=CHECK, severity="ok", found=f"open files (ulimit -n): {shown}")
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    return Finding(
        check=CHECK,
        severity="warning" if soft < LEAST_FILES else "note",
        found=f"open files are limited to {soft} (ulimit -n)",
        why="each connection of a client is an open file of the router; beyond it clients wait",
        remedy="raise the limit in the shell or service that starts Baton:",
        commands=(f"ulimit -n {max(soft, most)}",),
    )
