"""A test that starts a process or opens a connection fails unless it is marked for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.support.units import UnitGuard

def pytest_configure(config):
    config.pluginmanager.register(UnitGuard())
"""
# Those of the environment take a second to import.
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
TESTS = """
import socket, subprocess, sys, threading
import pytest

@pytest.fixture(scope="session")
def shared():
    subprocess.run([sys.executable, "-V"])

@pytest.fixture
def own():
    subprocess.run([sys.executable, "-V"])

def act(): socket.create_server(("127.0.0.1", 0)).close()

def test_a_connection(): act()
@pytest.mark.integration
def test_a_marked_connection(): act()
@pytest.mark.long
def test_a_long_connection(): act()
def test_a_process_of_its_fixture(own): pass
def test_a_process_of_the_session(shared): pass
def test_another_thread():
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
def test_the_loader():
    subprocess.run(["/sbin/ldconfig", "--version"], stdout=subprocess.DEVNULL)
def test_nothing(): pass
"""


@pytest.mark.integration
def test_only_marked_tests_may_start_processes_or_open_connections(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    integration\n    long\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", **NO_PLUGINS},
        capture_output=True,
        text=True,
        check=False,
    )
    refused = re.findall(r"^ERROR test_it.py::(\w+)", done.stdout, re.MULTILINE)
    assert refused == ["test_a_connection", "test_a_process_of_its_fixture"], done.stdout
    assert "is not marked `integration`, and used socket.bind" in done.stdout
