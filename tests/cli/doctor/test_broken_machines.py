"""A table of broken model folders, machines and ports: doctor finds each, its advice repairs it."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_cli.doctor.examination import examine
from baton_cli.doctor.finding import Finding
from baton_cli.doctor.gpu import check_gpu, judge_torch
from baton_cli.doctor.host import Host
from baton_cli.doctor.options import DoctorOptions
from baton_cli.doctor.side_by_side import Work, run_side_by_side
from baton_engine.weights.safetensors_files import LFS_POINTER
from baton_router.errors import ListenError
from tests.cli.doctor.setups import Setup, check_repaired, fake_root, find, names_of
from tests.cli.doctor.small_model import (
    CONFIG,
    FIRST,
    INDEX,
    SECOND,
    SHAPES,
    safetensors,
    write_model,
)
from tests.support.project.command import baton

pytestmark = pytest.mark.integration

MIB, GIB = 1 << 20, 1 << 30
POINTER = LFS_POINTER + b"v1\noid sha256:0000\nsize 1234\n"
Row = Callable[[Path], AbstractContextManager[Setup]]


def broken_file(name: str, file: str, content: bytes | None, found: str, remedy: str) -> Row:
    """A row of a model folder in which one file is wrong, or missing. The advice is to bring the
    right file."""

    @contextmanager
    def row(folder: Path) -> Iterator[Setup]:
        place = write_model(folder / "model") / file
        right = place.read_bytes()

        def follow(finding: Finding) -> None:
            place.write_bytes(right)

        if content is None:
            place.unlink()
        else:
            place.write_bytes(content)
        yield Setup(
            check="model",
            flags={"model": str(place.parent)},
            found=found,
            remedy=remedy,
            follow=follow,
        )

    row.__name__ = name
    return row


def config(**changes: Any) -> bytes:
    return json.dumps(CONFIG | changes).encode()


@contextmanager
def _no_folder(folder: Path) -> Iterator[Setup]:
    yield Setup(
        check="model",
        flags={"model": str(folder / "model")},
        found="the folder does not exist",
        remedy="baton model fetch",
        follow=lambda finding: {"model": str(write_model(folder / "model"))},
    )


@contextmanager
def _no_chat_template(folder: Path) -> Iterator[Setup]:
    model = write_model(folder / "model")
    template = model / "chat_template.jinja"
    text = template.read_text()
    template.unlink()

    def follow(finding: Finding) -> None:
        template.write_text(text)

    yield Setup(
        check="model",
        flags={"model": str(model)},
        found="the model has no chat template",
        remedy="--chat-template FILE",
        follow=follow,
    )


@contextmanager
def _too_little_memory_for_the_model(folder: Path) -> Iterator[Setup]:
    root = fake_root(folder / "root", 64 * MIB)

    def follow(finding: Finding) -> Host:
        more = re.search(r"(\d+) GiB of free memory", finding.remedy)
        assert more is not None, finding
        # Of a whole machine, in which `baton up` also has its store.
        return Host(root=fake_root(root, (2 * int(more[1]) + 1) * GIB))

    yield Setup(
        check="model",
        flags={"model": str(write_model(folder / "model"))},
        found="does not fit",
        remedy="GiB of free memory",
        follow=follow,
        host=Host(root=root),
    )


@contextmanager
def _too_little_memory_for_a_store(folder: Path) -> Iterator[Setup]:
    root = fake_root(folder / "root", 512 * MIB)
    yield Setup(
        check="machine",
        flags={},
        found="512 MiB of memory are free",
        remedy="--store-memory",
        follow=lambda finding: Host(root=fake_root(root, 4 * GIB)),
        host=Host(root=root),
    )


@contextmanager
def _few_open_files(folder: Path) -> Iterator[Setup]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    def follow(finding: Finding) -> None:
        [command] = finding.commands
        assert command.startswith("ulimit -n ")
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(command.split()[-1]), hard))

    try:
        yield Setup(
            check="machine",
            flags={},
            found="open files are limited to 256",
            remedy="ulimit -n",
            follow=follow,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def _a_port_that_is_taken(folder: Path) -> Iterator[Setup]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        yield Setup(
            check="port",
            flags={"port": port},
            found=f"Address already in use by pid {os.getpid()} (",
            remedy="give another --port",
            follow=lambda finding: taken.close(),
        )


WITHOUT = {name: shape for name, shape in SHAPES[SECOND].items() if name != "lm_head.weight"}
ROWS: list[Row] = [
    broken_file(
        *("a_missing_shard", SECOND, None),
        found=f"{SECOND} does not exist, and {INDEX} names it",
        remedy="fetch the whole model",
    ),
    broken_file(
        *("a_pointer_instead_of_weights", FIRST, POINTER),
        found="is a pointer of Git LFS",
        remedy="run git lfs pull in",
    ),
    broken_file(
        *("truncated_weights", FIRST, safetensors(SHAPES[FIRST])[:-8]),
        found="is truncated",
        remedy="fetch the whole model",
    ),
    broken_file(
        *("a_tensor_that_is_nowhere", SECOND, safetensors(WITHOUT)),
        found="names lm_head.weight in",
        remedy="fetch the whole model",
    ),
    broken_file(
        *("an_unknown_architecture", "config.json", config(architectures=["NoSuchForCausalLM"])),
        found="NoSuchForCausalLM",
        remedy="supported: ",
    ),
    broken_file(
        *("a_config_that_is_no_json", "config.json", b"{"),
        found="config.json is not valid JSON",
        remedy="",
    ),
    broken_file(
        *("a_config_without_sizes", "config.json", config(hidden_size=None)),
        found="hidden_size",
        remedy="",
    ),
    broken_file(
        *("no_tokenizer", "tokenizer.json", None),
        found="it has no tokenizer.json",
        remedy="fetch the whole model",
    ),
    broken_file(
        *("a_tokenizer_that_is_a_pointer", "tokenizer.json", POINTER),
        found="tokenizer",
        remedy="fetch the whole model",
    ),
    broken_file(
        *("a_template_with_an_error", "chat_template.jinja", b"{% for %}"),
        found="chat template 'default', line 1",
        remedy="--chat-template FILE",
    ),
    _no_folder,
    _no_chat_template,
    _too_little_memory_for_the_model,
    _too_little_memory_for_a_store,
    _few_open_files,
    _a_port_that_is_taken,
]


@pytest.mark.parametrize("row", ROWS, ids=names_of(ROWS))
def test_doctor_finds_what_is_broken_and_its_advice_repairs_it(row: Row, tmp_path: Path) -> None:
    with row(tmp_path) as setup:
        finding = find(setup)
        check_repaired(setup, setup.follow(finding))


@pytest.mark.parametrize(
    ("built", "runs", "found"),
    [
        (None, "13.0", ""),
        ("12.8", "12.4", ""),
        ("12.8", "13.0", ""),
        ("13.0", "12.9", "torch is built for CUDA 13.0, and the driver runs at most 12.9"),
        ("12.8", None, "libcuda.so.1 cannot be loaded"),
        ("", "12.9", "torch is built for CPUs only"),
    ],
)
def test_torch_fits_a_driver_of_its_major_version(
    built: str | None, runs: str | None, found: str
) -> None:
    bad = [each for each in judge_torch(built, runs) if each.severity in ("warning", "error")]
    assert [each.found for each in bad] == ([found] if found else [])
    assert all(each.remedy for each in bad)


def test_a_gpu_whose_driver_has_no_utilities_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    monkeypatch.setenv("PATH", "")
    [finding] = check_gpu(Host(root=tmp_path))
    assert finding.severity == "error"
    assert finding.found.startswith("nvidia-smi does not answer: ")
    assert finding.remedy.startswith("install the driver's utilities")


def test_huge_pages_that_are_off_are_a_note_with_a_command(tmp_path: Path) -> None:
    root = fake_root(tmp_path, 8 * GIB)
    place = root / "sys/kernel/mm/transparent_hugepage"
    place.mkdir(parents=True)
    (place / "enabled").write_text("always madvise [never]\n")
    [note] = [each for each in findings(root) if "huge pages" in each.found]
    assert note.severity == "note"
    assert note.commands == ("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("avx2 avx512f avx512_bf16 amx_bf16", "AVX2, AVX-512, AVX-512 BF16, AMX; --dtype auto "),
        ("avx2", "the CPU has AVX2; --dtype auto computes in float32"),
    ],
)
def test_the_cpu_s_instructions_decide_the_dtype(flags: str, text: str, tmp_path: Path) -> None:
    root = fake_root(tmp_path, 8 * GIB)
    (root / "proc" / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    assert any(text in each.found for each in findings(root))


def findings(root: Path) -> list[Finding]:
    return examine(DoctorOptions(port=0), Host(root=root))


def test_a_check_that_hangs_does_not_hold_up_the_others() -> None:
    ends = socket.socketpair()

    def hang() -> Iterator[int]:
        yield 1
        ends[0].recv(1)
        yield 2

    hung, quick = run_side_by_side([Work("a", hang, 0.2), Work("b", lambda: [3], 60.0)])
    assert (hung.results, hung.ended) == ((1,), False)
    assert (quick.results, quick.ended) == ((3,), True)
    ends[1].send(b"x")
    for end in ends:
        end.close()


def test_the_exit_code_is_that_of_the_worst_finding(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    flags = ("--model", str(model), "--port", "0", "--json")
    assert worst(flags)[1] in (0, 3)  # this machine may have warnings
    (model / "chat_template.jinja").unlink()
    assert worst(flags) == ("warning", 3)
    (model / SECOND).unlink()
    assert worst(flags) == ("error", 1)


def worst(flags: tuple[str, ...]) -> tuple[str, int]:
    done = baton("doctor", *flags)
    records = json.loads(done.stdout)
    assert records[0].keys() == {"check", "severity", "found", "why", "remedy", "commands"}
    severities = {record["severity"] for record in records}
    order = ("error", "warning", "note", "ok")
    return next(each for each in order if each in severities), done.returncode


def test_without_flags_it_checks_the_machine_and_the_port_of_up() -> None:
    done = baton("doctor")
    checks = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert checks[:-1] == ["machine", "gpu", "port"]


def test_a_start_says_the_same_of_a_folder_as_doctor(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    start = baton("up", "--model", str(model), "--port", "0")
    [record] = [
        each
        for each in json.loads(baton("doctor", "--model", str(model), "--json").stdout)
        if each["check"] == "model"
    ]
    assert start.stderr == f"baton: {record['found']}; {record['remedy']}\n"


def test_a_router_whose_port_is_taken_says_how_to_find_the_process() -> None:
    taken = OSError(errno.EADDRINUSE, "Address already in use")
    assert "; `baton doctor --port 8000` says" in str(ListenError("127.0.0.1:8000", taken))
    assert "doctor" not in str(ListenError("unix:router.sock", taken))
