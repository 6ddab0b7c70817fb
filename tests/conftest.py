"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from baton_cli.models.demo_model import fetch_demo
from tests.support import fork_server
from tests.support.engines.interpreter import quicken_interpreter
from tests.support.engines.tiny_models import make_tiny_model
from tests.support.loggers import catch_logs_at_the_root
from tests.support.needs import NEEDS, needs
from tests.support.pairwise import mark_the_rest_long
from tests.support.project.collected import COLLECTED
from tests.support.units import UnitGuard
from tests.support.worker_messages import join_messages

SPREAD = ("tests/e2e/test_exactness.py",)
# On a GPU their tests spend most of their time in triton's compiler, half a second per kernel.
COMPILING = "tests/engine/kernels/"
# Whose tests are all of several processes.
INTEGRATION = ("tests/browser/", "tests/cluster/", "tests/e2e/", "tests/faults/")
# Their tests wait more than they compute. Files that compute run beside them, not after them.
WAITING = ("tests/cli/local_pool/", "tests/e2e/", "tests/faults/", "tests/router/server/")
# The part of a run in which they begin: a test that waits for a minute must not be the last one.
WAITING_PART = 0.75
# These share one Kubernetes with nodes, which fills this machine. They come first: no other file's
# tests take as long, and the other workers run the rest meanwhile.
TOGETHER = ("tests/cluster/test_node_",)

# New objects after which Python looks for garbage among them.
YOUNG_OBJECTS = 10_000

# Keep compiled modules even where the environment says no: each worker would spend 10 s on asserts,
# and each process of a pool would compile all of Baton again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before anybody loads torch: idle threads that spin take the cores from other workers and pools.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Before anybody loads triton, which looks then: without a GPU kernels run in its interpreter.
if not NEEDS["gpu"].present():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine may take seconds over one example, which says nothing about the code.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Path]:
    """Name of a random tiny model -> its folder (see tests/support/engines/tiny_models). "NAME in
    LAYOUT" is the same model with quantized weights (see quantized/quantized_models beside it)."""

    def folder_of(name: str) -> Path:
        if " in " not in name:
            return make_tiny_model(name)
        from tests.support.engines.quantized.quantized_models import model_folders  # loads torch

        return model_folders(name).folder

    return folder_of


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's folder; the first to ask on a machine converts it, in 20 s."""
    needs("demo_model")
    return fetch_demo(None, lambda line: None)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.has_plugin(fork_server.IMPORTER):
        return
    config.pluginmanager.register(UnitGuard())
    join_messages(config)
    ignored = [f"--ignore={path}" for path in config.getoption("ignore") or ()]
    fork_server.install(workers=not NEEDS["gpu"].present(), tests=[*config.args, *ignored])


@pytest.hookimpl(tryfirst=True)  # before -m looks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = tuple(items)
    mark_the_rest_long(items)
    for item in items:
        if item.nodeid.startswith(INTEGRATION):
            item.add_marker("integration")
    begins = in_turn(dict.fromkeys(map(file_of, items)))
    items.sort(key=lambda item: (not item.nodeid.startswith(TOGETHER), begins[file_of(item)]))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def in_turn(files: Iterable[str]) -> dict[str, float]:
    """When each file begins, from 0 to 1: those that wait at equal distances among the others."""
    waiting, computing = list[str](), list[str]()
    for file in files:
        (waiting if file.startswith(WAITING) else computing).append(file)
    return {
        **{file: at / len(computing) for at, file in enumerate(computing)},
        **{file: at / len(waiting) * WAITING_PART for at, file in enumerate(waiting)},
    }


def pytest_collection_finish() -> None:
    quicken_interpreter()  # which tests of kernels have imported
    catch_logs_at_the_root()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Each worker collects all tests, and imports what they import: a million objects, which stay.
    Garbage collections among them would take a quarter of the time, and later ones a second each:
    these look only at what tests make, and less often than Python's own, which would take a tenth
    of the time of small tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        gc.enable()


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it is untyped
    """A file's tests run in one worker, since they share pools and servers; those of SPREAD files
    start what they need themselves, and run wherever there is room, as do those of kernels on a
    GPU; those of all TOGETHER files run
    in one worker. Not the longest files first, by number of tests, as xdist would: the few tests
    that take a minute came last."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        together = [start for start in TOGETHER if path.startswith(start)]
        spread = path in SPREAD or (path.startswith(COMPILING) and NEEDS["gpu"].present())
        return nodeid if spread else [*together, path][0]

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node in self.registered_collections:
            self.registered_collections[node] = Places(collection)


class Places(list[str]):
    """The tests of a run, of each of which xdist asks where it is."""

    def __init__(self, tests: Sequence[str]) -> None:
        super().__init__(tests)
        self._places = {test: place for place, test in enumerate(tests)}

    def index(self, test: str, *_: Any) -> int:
        return self._places[test]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests counted: differences are accepted, and faults survived, only so."""
    for title in ("exactness", "chaos", "soak", "scaling", "images", "page"):
        lines = [
            str(value)
            for report in terminalreporter.getreports("passed")
            for name, value in getattr(report, "user_properties", ())
            if name == title
        ]
        if lines:
            terminalreporter.section(title)
            for line in sorted(lines):
                terminalreporter.write_line(line)
