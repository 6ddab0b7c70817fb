"""The benchmarks find the rivals where `make` installs them, and do not pass without one that was
asked for by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.router.overhead import options_of
from benchmarks.support import rivals
from benchmarks.support.engine.cpu_engines import vllm_takes_part
from benchmarks.support.kv.peers import NAMES, peers
from benchmarks.support.rivals import PEERS, ROOT, ROUTERS, TARGETS, repository, takes_part
from benchmarks.support.router.routers import RIVALS, installed

THERE = PEERS.exists() or ROUTERS.exists()
no_rivals = pytest.mark.skipif(THERE, reason="the rivals are installed here")


@pytest.mark.parametrize("programs", TARGETS)
def test_each_environment_is_where_its_make_target_creates_it(programs: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.partition(f"\n{TARGETS[programs]}:")[2].partition("\n.PHONY")[0]
    folders = set(re.findall(r"-m venv (\S+)", recipe))
    assert {ROOT / folder / "bin" for folder in folders} == {programs}


@pytest.mark.parametrize("depth", range(5))
def test_a_repository_is_found_from_any_depth(tmp_path: Path, depth: int) -> None:
    (tmp_path / "pyproject.toml").touch()
    inside = tmp_path.joinpath(*"abcde"[:depth])
    inside.mkdir(parents=True, exist_ok=True)
    assert repository(inside / "file.py") == tmp_path


@no_rivals
@pytest.mark.parametrize(
    "ask",
    [
        lambda: vllm_takes_part(asked=True),
        *(lambda name=name: peers(1, [name]).__enter__() for name in NAMES),
        lambda: peers(1, list(NAMES)).__enter__(),
        *(lambda name=name: options_of(["--rivals", name]) for name in RIVALS),
    ],
)
def test_a_rival_that_is_asked_for_and_missing_is_an_error(ask: Callable[[], Any]) -> None:
    with pytest.raises(SystemExit, match=r"is not in \S+/\.venv-peers(-routers)?: make peers"):
        ask()


@no_rivals
def test_without_rivals_benchmarks_say_so_and_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert not vllm_takes_part(asked=False)
    with peers(1) as worker:
        assert worker is None
    assert options_of([]).rivals == installed() == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + len(NAMES) + len(RIVALS)
    assert all(line.endswith("; it is not compared") for line in lines)


def test_no_rival_is_asked_for_by_an_empty_list() -> None:
    assert options_of(["--rivals"]).rivals == []
    assert options_of(["--quick"]).rivals == []


def test_a_rival_that_is_there_takes_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert takes_part("vLLM", rivals.PEERS, there=True, asked=True)
    assert capsys.readouterr().err == ""
