"""What the tables of broken set-ups share: a row, and the check of it.

A row breaks something, and says what `baton doctor` finds and advises. The check then follows the
advice, and the next run must be clean.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis

from baton_cli.doctor import (
    bandwidth,
    cluster,
    gpu,
    machine,
    model_folder,
    ports,
    redis_servers,
    router,
)
from baton_cli.doctor.examination import examine
from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host
from baton_cli.doctor.options import DoctorOptions
from tests.support.stores.kvstore import plain_client

BAD = ("warning", "error")
PATIENCE = 10.0  # for whatever answers; what does not answer costs a deadline
# Imported before a check runs, which would spend its deadline on it.
CHECKS = (bandwidth, cluster, gpu, machine, model_folder, ports, redis_servers, router)
Flags = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A broken set-up. `found` is in what doctor finds, `remedy` in what it advises: in the words
    or in a command. `follow` acts as advised, and returns changes of the flags or of the host."""

    check: str
    flags: Flags
    found: str
    remedy: str
    follow: Callable[[Finding], Flags | Host | None]
    host: Host = field(default_factory=lambda: Host(patience=PATIENCE))


def problems(check: str, flags: Flags, host: Host) -> list[Finding]:
    """Warnings and errors of one check: a test machine may have others."""
    findings = examine(DoctorOptions(**({"port": 0} | dict(flags))), host)
    return [each for each in findings if each.check == check and each.severity in BAD]


def advice(finding: Finding) -> str:
    return "\n".join((finding.remedy, *finding.commands))


def find(setup: Setup) -> Finding:
    """The one problem of the set-up."""
    found = problems(setup.check, setup.flags, setup.host)
    [finding] = found
    assert setup.found in finding.found, finding
    assert setup.remedy in advice(finding), finding
    assert finding.why
    return finding


def check_repaired(setup: Setup, change: Flags | Host | None) -> None:
    flags, host = dict(setup.flags), replace(setup.host, patience=PATIENCE)
    if isinstance(change, Host):
        host = replace(change, patience=PATIENCE)
    elif change is not None:
        flags |= change
    left = problems(setup.check, flags, host)
    assert not left, left


def run_redis_command(url: str) -> Callable[[Finding], None]:
    """Runs the `redis-cli` command of a finding, without redis-cli."""

    def follow(finding: Finding) -> None:
        [command] = finding.commands
        words = shlex.split(command)
        assert words[0] == "redis-cli"
        assert words[2] in url
        with plain_client(url) as client:
            client.execute_command(*words[words.index("CONFIG") :])

    return follow


def set_config(url: str, settings: Mapping[str, str]) -> None:
    with plain_client(url) as client:
        for name, value in settings.items():
            client.config_set(name, value)


def used_bytes(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def fake_root(folder: Path, available_bytes: int) -> Path:
    """A /proc with this memory."""
    (folder / "proc").mkdir(parents=True, exist_ok=True)
    (folder / "proc" / "meminfo").write_text(f"MemAvailable: {available_bytes >> 10} kB\n")
    return folder


def names_of(rows: Sequence[Callable[..., object]]) -> list[str]:
    return [row.__name__.removeprefix("_") for row in rows]
