"""`baton` as a user types it, until it ends: in this process, or in one of its own.

In: the words after `baton`, its stdin, its working folder, BATON_ variables. Out: its exit code and
what it said. It sees no BATON_ variable but those given, and no API key.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

from baton_cli.main import main

END_S = 280.0


def baton(
    *words: str,
    given: str = "",
    where: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """In this process, which saves the start of Python and its imports. Not for roles: they set up
    logging for the whole process."""
    out, err = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    with (
        patch.object(root, "handlers", list(root.handlers)),  # none stays that writes to `err`
        patch.object(root, "level", root.level),
        patch.dict(os.environ, _environment(variables), clear=True),
        patch.object(sys, "stdin", io.StringIO(given)),
        redirect_stdout(out),
        redirect_stderr(err),
        chdir(where or "."),
    ):
        try:
            code = main(words)
        except SystemExit as ending:  # argparse's
            code = int(ending.code or 0)
    return CompletedProcess(words, code, out.getvalue(), err.getvalue())


def baton_process(
    *words: str,
    given: str = "",
    where: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """In a process of its own, as in a shell."""
    return subprocess.run(
        [sys.executable, "-m", "baton_cli", *words],
        input=given,
        env=_environment(variables),
        cwd=where,
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )


def figures(path: Path, *words: str) -> dict[str, Any]:
    """What a run of `baton bench` that went well, and was silent on stderr, has written to
    `path`."""
    done = baton("bench", *words, "--output-json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("BATON_")}
    return {**inherited, "OPENAI_API_KEY": "", **(variables or {})}
