"""Where `make peers` and `make peers-routers` install the rivals, and what happens without them.

In: the folder of an environment, and the rivals that are wanted. Out: their programs. A rival that
was asked for by name and is not there ends the benchmark; one that would merely take part is left
out, and a line says so.
"""

from __future__ import annotations

import sys
from pathlib import Path


def repository(inside: Path) -> Path:
    """The repository that contains this file. Raise StopIteration outside of one."""
    return next(
        folder for folder in inside.resolve().parents if (folder / "pyproject.toml").exists()
    )


ROOT = repository(Path(__file__))
PEERS, ROUTERS = ROOT / ".venv-peers" / "bin", ROOT / ".venv-peers-routers" / "bin"
TARGETS = {PEERS: "peers", ROUTERS: "peers-routers"}


def takes_part(rival: str, programs: Path, *, there: bool, asked: bool) -> bool:
    """Whether the rival of the environment with these programs is compared. Raise SystemExit if it
    was asked for by name and is not there."""
    if there:
        return True
    missing = f"{rival} is not in {programs.parent}: make {TARGETS[programs]} installs it"
    if asked:
        raise SystemExit(missing)
    print(f"{missing}; it is not compared", file=sys.stderr)
    return False
