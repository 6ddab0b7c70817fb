"""Completion in real shells: Tab completes commands, flags, values and files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from baton_cli.completion import SCRIPTS
from baton_cli.completion.words import command_words
from baton_cli.main import COMMANDS
from tests.support.needs import needs
from tests.support.project.command import baton
from tests.support.terminal import Terminal

COMMAND = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
    "fish": ("fish", "--no-config", "-i"),
}
# In place of `baton`, a function that prints its arguments.
POSIX = 'baton() { echo "got: $*"; }; '
# What a user's own configuration does before it.
BEFORE = {
    "bash": POSIX,
    "zsh": f"{POSIX}autoload -U compinit; compinit -u -D; ",
    "fish": 'function baton; echo "got: $argv"; end; ',
}
DONE = "rea''dy"  # the shell prints it without the quotes


class Case(NamedTuple):
    """What is typed after `baton` and before Tab, and the arguments after it."""

    typed: str
    arguments: str


CASES = (
    Case("comple", "completion"),
    Case("bench thr", "bench throughput"),
    Case("model fetch-d", "model fetch-demo"),
    Case("up --kv-mem", "up --kv-memory"),
    Case("up --no-json-l", "up --no-json-logs"),
    Case("up --engine s", "up --engine sim"),
    Case("up --engine=s", "up --engine=sim"),
    Case("bench serve --dataset-name tra", "bench serve --dataset-name trace"),
    Case("completion fi", "completion fish"),
    Case("up --model mod", "up --model model-folder"),
    Case("up --api-keys mod", "up --api-keys model-folder"),
)


@pytest.mark.integration
@pytest.mark.parametrize("shell", SCRIPTS)
def test_tab_completes_commands_flags_values_and_files(shell: str, tmp_path: Path) -> None:
    if shell != "bash":
        needs(shell)
    (tmp_path / "model-folder").mkdir()
    (tmp_path / "script").write_text(SCRIPTS[shell](command_words()))
    variables = {"HOME": str(tmp_path), "HISTFILE": "", "XDG_CONFIG_HOME": str(tmp_path)}
    with Terminal(COMMAND[shell], variables=variables, columns=160) as terminal:
        terminal.type(f"cd {tmp_path}; {BEFORE[shell]}source ./script; echo {DONE}\n")
        terminal.wait_for("ready")
        for case in CASES:
            terminal.type(f"baton {case.typed}\t\n")
            terminal.wait_for(f"got: {case.arguments}")
            terminal.type("clear\n")
            terminal.wait_until_gone("got: ")


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_script_has_each_command_with_each_of_its_flags(shell: str) -> None:
    done = baton("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    for command in command_words():
        for flag in command.flags:
            for name in flag.names:
                word = name.removeprefix("--") if shell == "fish" else name
                assert re.search(rf"(?<![\w-]){word}(?![\w-])", done.stdout), name
    assert {" ".join(command.words) for command in command_words()} == {
        command.words for command in COMMANDS
    }


def test_another_shell_is_refused_with_those_that_exist() -> None:
    done = baton("completion", "tcsh")
    assert done.returncode == 2
    assert "argument SHELL: 'tcsh' is not one of bash, zsh, fish" in done.stderr
