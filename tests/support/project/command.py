"""Runs a `baton` command to its end, in this process or in its own.

In: its arguments, stdin, working folder and BATON_ variables. Out: its exit code, stdout and
stderr. It sees no other BATON_ variables, and no API key.
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
    *arguments: str,
    given: str = "",
    where: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """Run a command in this process, which saves Python's start and imports. Not for roles that
    serve: they end by a signal."""
    out, err = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    with (
        patch.object(root, "handlers", list(root.handlers)),  # remove handlers that write to `err`
        patch.object(root, "level", root.level),
        patch.dict(os.environ, _environment(variables), clear=True),
        patch.object(sys, "stdin", io.StringIO(given)),
        redirect_stdout(out),
        redirect_stderr(err),
        chdir(where or "."),
    ):
        try:
            code = main(arguments)
        except SystemExit as exit_:  # by argparse
            code = int(exit_.code or 0)
    return CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def baton_process(
    *arguments: str,
    given: str = "",
    where: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """Run a command in its own process, as in a shell."""
    return subprocess.run(
        [sys.executable, "-m", "baton_cli", *arguments],
        input=given,
        env=_environment(variables),
        cwd=where,
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )


def figures(path: Path, *arguments: str) -> dict[str, Any]:
    """Run `baton bench`, which must succeed without output on stderr, and return the JSON that it
    wrote to `path`."""
    done = baton("bench", *arguments, "--output-json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    written: dict[str, Any] = json.loads(path.read_text())
    return written


def _environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("BATON_")}
    return {**inherited, "OPENAI_API_KEY": "", **(variables or {})}
