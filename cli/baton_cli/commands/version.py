"""`baton version`: the versions of Baton and of the libraries that affect answers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from baton_cli.options.records import VersionOptions
from baton_protocol import PROTOCOL_VERSION

DISTRIBUTION = "baton-serve"
NOT_INSTALLED = "not installed"


def run(options: VersionOptions) -> int:
    """Print the versions of Baton, its protocol, and the libraries that affect answers."""
    parts = [f"baton {installed_version(DISTRIBUTION)}", f"protocol {PROTOCOL_VERSION}"]
    for name in ("torch", "transformers", "tokenizers", "redis"):
        parts.append(f"{name} {installed_version(name)}")
    print("\n".join(parts))
    return 0


def installed_version(name: str) -> str:
    """The version of a distribution, or NOT_INSTALLED."""
    try:
        return installed(name)
    except PackageNotFoundError:
        return NOT_INSTALLED
