"""`baton version`: the versions of Baton and of the libraries that affect answers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from baton_cli.options.records import VersionOptions
from baton_protocol import PROTOCOL_VERSION


def run(options: VersionOptions) -> int:
    """Print the versions of Baton, its protocol, and the libraries that affect answers."""
    parts = [f"baton {_installed('baton-serve')}", f"protocol {PROTOCOL_VERSION}"]
    for name in ("torch", "transformers", "tokenizers", "redis"):
        parts.append(f"{name} {_installed(name)}")
    print("\n".join(parts))
    return 0


def _installed(name: str) -> str:
    try:
        return installed(name)
    except PackageNotFoundError:
        return "not installed"
