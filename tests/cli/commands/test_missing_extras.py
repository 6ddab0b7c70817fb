"""Each command without its extra prints one line that names what to install.

The child process can import Baton's packages, the standard library, msgspec (the one dependency
outside the extras) and the demo model's package (which no extra installs).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from baton_cli.main import COMMANDS, Command
from baton_cli.models.demo_model import PACKAGE

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
ROOMS = [
    str(path.parent.parent) for path in ROOT.glob("*/*/__init__.py") if "tests" not in path.parts
]
# Flags that a command requires before it imports anything, or the address of no router.
REQUIRED_FLAGS = {
    "up": ["--engine=sim"],
    "router": ["--nodes=http://127.0.0.1:9"],
    "operator": ["--node-image=n", "--router-image=r", "--redis-image=s"],
    "generate": ["--model=.", "--prompt=Once"],
    "bench serve": ["--base-url=http://127.0.0.1:9"],
    "model fetch": ["hf://org/name", "--to=never"],
    "chat": ["--url=http://127.0.0.1:1"],
    "top": ["--url=http://127.0.0.1:1"],
    "explain": ["0", "--url=http://127.0.0.1:1"],
    "completion": ["bash"],
}


def run_without_extras(
    command: Command, folder: Path, *, main: str = "baton_cli.main"
) -> subprocess.CompletedProcess[str]:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    for package in ("msgspec", PACKAGE):
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        (folder / package).symlink_to(Path(spec.origin).parent)
    start = f"import sys; sys.path += {[*ROOMS, str(folder)]!r}; from {main} import main"
    argv = [*command.words.split(), *REQUIRED_FLAGS.get(command.words, [])]
    return subprocess.run(
        [sys.executable, "-S", "-c", f"{start}; sys.exit(main({argv!r}))"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        input="Hello",
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder), "PATH": ""},
    )


@pytest.mark.parametrize(
    "command", [one for one in COMMANDS if one.extra], ids=lambda command: command.words
)
def test_a_command_without_its_extra_names_it_in_one_line(command: Command, tmp_path: Path) -> None:
    done = run_without_extras(command, tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert f"pip install '.[{command.extra}]'" in done.stderr


def test_doctor_runs_without_an_extra_and_shows_what_is_missing(tmp_path: Path) -> None:
    [doctor] = [one for one in COMMANDS if one.words == "doctor"]
    done = run_without_extras(doctor, tmp_path)
    assert done.returncode in (0, 3)  # this machine may have warnings
    assert "torch not installed" in " ".join(done.stdout.split())
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("chat", "no router answers at http://127.0.0.1:1"),
        ("top", "no router answers at http://127.0.0.1:1"),
        ("explain", "no router answers at http://127.0.0.1:1"),
        ("completion", "complete -F _baton baton"),
    ],
)
def test_a_command_for_a_terminal_needs_no_extra(words: str, output: str, tmp_path: Path) -> None:
    [command] = [one for one in COMMANDS if one.words == words]
    done = run_without_extras(command, tmp_path)
    assert output in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_plugin_of_kubectl_needs_no_extra(tmp_path: Path) -> None:
    why = COMMANDS[0]._replace(words="why demo")
    done = run_without_extras(why, tmp_path, main="baton_cli.kubectl.main")
    assert done.stderr.startswith("kubectl baton: kubectl is not on the PATH")
