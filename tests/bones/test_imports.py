"""The import contracts between packages, and which modules load no torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "protocol", "text", "kvstore", "engine", "node", "prefill_node", "decode_node", "router",
    "operator", "cli",
)  # fmt: skip
HEAVY = ("torch", "transformers")
WITHOUT_TORCH = (
    *("baton_protocol", "baton_text.chat", "baton_text.tokenizer"),
    *("baton_kvstore.connection.client", "baton_kvstore.embedded.servers"),
    *("baton_engine", "baton_engine.sim.build", "baton_cli.engine_process"),
    *("baton_node.server.app", "baton_prefill_node.serve", "baton_decode_node.serve"),
    *("baton_router.server.router", "baton_operator"),
    *("baton_cli.main", "baton_cli.commands.roles", "baton_cli.commands.up"),
    *("baton_cli.local_pool.store", "baton_cli.local_pool.supervisor"),
)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_import_contracts_hold() -> None:
    done = run("-c", "from importlinter.cli import lint_imports_command as main; main()")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = re.search(r"Contracts: (\d+) kept, 0 broken", done.stdout)
    assert kept is not None
    assert int(kept[1]) >= 5


def test_every_package_is_in_the_wheel_and_under_the_contracts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(path.split("/")[0] for path in packages) == sorted(ROOMS)
    roots = project["tool"]["importlinter"]["root_packages"]
    assert sorted(path.split("/")[1] for path in packages) == sorted(roots)
    for path in packages:
        assert (ROOT / path / "py.typed").is_file(), path


def test_the_operator_folder_does_not_shadow_python_s_operator() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    done = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.add(1, 2))"],
        cwd=ROOT / "operator",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == "3"


def test_importing_modules_outside_the_torch_engine_loads_no_torch() -> None:
    """One process imports them one after another, and names the first that loads torch."""
    script = (
        f"import sys, importlib\nfor name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = sorted({{*{HEAVY!r}}} & sys.modules.keys())\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')\n"
    )
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
