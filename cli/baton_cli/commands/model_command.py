"""`baton model fetch-demo` and `baton version`."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path

from baton_cli.commands.fetch_options import FetchDemoOptions
from baton_cli.errors import CommandError
from baton_cli.options.records import VersionOptions
from baton_protocol import PROTOCOL_VERSION


def fetch_demo(options: FetchDemoOptions) -> int:
    """Make the demo model and print its folder on stdout, progress on stderr."""
    from baton_cli.models import demo_model

    cache = Path(options.cache).expanduser() if options.cache else None
    try:
        folder = demo_model.fetch_demo(cache, lambda line: print(line, file=sys.stderr, flush=True))
    except demo_model.DemoModelError as error:
        raise CommandError(str(error)) from error
    print(folder)
    return 0


def version(options: VersionOptions) -> int:
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
