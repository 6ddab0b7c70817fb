"""Each entry point runs under a user id that /etc/passwd does not list, as containers often do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton_cli.commands.up import reserve_port
from tests.support.needs import needs
from tests.support.project.entry_points import (
    ENTRY_POINTS,
    KUBECONFIG,
    START_S,
    UNKNOWN_UID,
    wait_until_it_answers,
    words_of,
)

pytestmark = pytest.mark.integration

# The process keeps one right of root: it may read this checkout and its Python anywhere.
AS_UNKNOWN = (
    *("setpriv", f"--reuid={UNKNOWN_UID}", f"--regid={UNKNOWN_UID}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--pdeathsig=KILL"),
)
# Images and the chart set HOME. The operator needs it: the Kubernetes client reads it on import.
HOMES = [(name, "/tmp") for name in ENTRY_POINTS] + [
    (name, None) for name in ENTRY_POINTS if name != "operator"
]
IN_MAKE_TEST = {("operator", "/tmp"), ("router", None), ("sim decode", None)}
CASES = [pytest.param(*one, marks=() if one in IN_MAKE_TEST else pytest.mark.long) for one in HOMES]


def environment(folder: Path, home: str | None) -> dict[str, str]:
    """Variables without any that names a user."""
    variables = {"PATH": os.environ["PATH"], "KUBECONFIG": str(folder / "kubeconfig")}
    if home is not None:
        variables["HOME"] = home
    return variables


@pytest.mark.parametrize(("name", "home"), CASES)
def test_an_entry_point_starts_as_a_user_that_passwd_does_not_list(
    name: str, home: str | None, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    needs("root")
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    log = tmp_path / "log"
    with reserve_port("127.0.0.1", 0) as reserved:
        model = str(tiny_model("llama-gqa1")) if "torch" in name else ""
        argv, url = words_of(name, reserved.getsockname()[1], model)
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [*AS_UNKNOWN, sys.executable, "-m", "baton_cli", *argv],
                env=environment(tmp_path, home),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            ) as process,
        ):
            try:
                wait_until_it_answers(url, lambda: process.poll() is not None, log.read_text)
            finally:
                process.terminate()
                process.wait(START_S)
