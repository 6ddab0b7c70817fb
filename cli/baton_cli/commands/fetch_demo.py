"""`baton model fetch-demo`: makes the demo model."""

from __future__ import annotations

import sys
from pathlib import Path

from baton_cli.commands.fetch_options import FetchDemoOptions
from baton_cli.errors import CommandError


def run(options: FetchDemoOptions) -> int:
    """Make the demo model and print its folder on stdout, progress on stderr."""
    from baton_cli.models import demo_model

    cache = Path(options.cache).expanduser() if options.cache else None
    try:
        folder = demo_model.fetch_demo(cache, lambda line: print(line, file=sys.stderr, flush=True))
    except demo_model.DemoModelError as error:
        raise CommandError(str(error)) from error
    print(folder)
    return 0
