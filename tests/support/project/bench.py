"""`baton bench` as a user runs it, in a process of its own.

In: the words after `baton bench`. Out: how it ended and what it said, or the figures of its JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

END_S = 280.0


def bench(*words: str, where: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`where` is its working folder (default: ours). It knows no API key."""
    return subprocess.run(
        [sys.executable, "-m", "baton", "bench", *words],
        env={**os.environ, "OPENAI_API_KEY": ""},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )


def figures(path: Path, *words: str) -> dict[str, Any]:
    """What a run that went well, and was silent on stderr, has written to `path`."""
    done = bench(*words, "--output-json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(path.read_text())
    return found
