"""Each entry point runs as a user id that /etc/passwd does not list, as containers do."""

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

# It may read this checkout and its Python wherever they lie; nothing else of root's.
AS_UNKNOWN = (
    *("setpriv", f"--reuid={UNKNOWN_UID}", f"--regid={UNKNOWN_UID}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--pdeathsig=KILL"),
)
# Images and the chart set HOME. The operator needs it: Kubernetes' client asks for it on import.
HOMES = [(name, "/tmp") for name in ENTRY_POINTS] + [
    (name, None) for name in ENTRY_POINTS if name != "operator"
]
IN_MAKE_TEST = {("operator", "/tmp"), ("router", None), ("sim decode", None)}
CASES = [pytest.param(*one, marks=() if one in IN_MAKE_TEST else pytest.mark.long) for one in HOMES]


def environment(folder: Path, home: str | None) -> dict[str, str]:
    """Nothing in it names a user."""
    found = {"PATH": os.environ["PATH"], "KUBECONFIG": str(folder / "kubeconfig")}
    if home is not None:
        found["HOME"] = home
    return found


@pytest.mark.parametrize(("name", "home"), CASES)
def test_it_starts_as_a_user_that_passwd_does_not_list(
    name: str, home: str | None, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    needs("root")
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    log = tmp_path / "log"
    with reserve_port("127.0.0.1", 0) as held:
        model = str(tiny_model("llama-gqa1")) if "torch" in name else ""
        words, url = words_of(name, held.getsockname()[1], model)
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [*AS_UNKNOWN, sys.executable, "-m", "baton_cli", *words],
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
