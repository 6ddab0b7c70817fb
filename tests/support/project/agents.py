"""Published command-line agents: Claude Code and Codex from npm, mini-swe-agent from PyPI.

In: tests/cluster/agents, which pins every package by its digest. Out: how each agent is run,
installed once in the user's cache by the first test that needs it. `npm install --package-lock-only
--omit-lockfile-registry-resolved` updates a lock file.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.project.cache import made_once

CONFIG = Path(__file__).resolve().parents[2] / "cluster" / "agents"
LOCK, REQUIREMENTS = "package-lock.json", "requirements.txt"
PINNED = ("package.json", LOCK)
INSTALL_S = 600.0


@dataclass(frozen=True)
class Agent:
    """`words` begin its command line; it also needs the variables."""

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


def claude_code() -> Agent:
    """Claude Code; its package is one program for each platform."""
    [program] = (_of_npm("claude-code") / "@anthropic-ai").glob("claude-code-*/claude")
    return Agent([str(program)])


def codex() -> Agent:
    return Agent([str(_of_npm("codex") / ".bin" / "codex")])


def mini_swe_agent() -> Agent:
    """mini-swe-agent, in this Python with this checkout's litellm."""
    folder = made_once("mini-swe-agent", _digest(CONFIG / REQUIREMENTS), _install_pip)
    return Agent([sys.executable, "-m", "minisweagent.run.mini"], {"PYTHONPATH": str(folder)})


def _of_npm(agent: str) -> Path:
    """The folder with the packages of this agent."""

    def install(folder: Path) -> None:
        for name in PINNED:
            shutil.copy(CONFIG / agent / name, folder)
        # Do not run the packages' install scripts.
        _run(folder, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")

    return made_once(agent, _digest(CONFIG / agent / LOCK), install) / "node_modules"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _install_pip(folder: Path) -> None:
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes")
    _run(folder, *install, f"--target={folder}", f"--requirement={CONFIG / REQUIREMENTS}")


def _run(folder: Path, *words: str) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
