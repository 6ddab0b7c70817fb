"""`python -m baton`: what the supervisor starts its children with; the same as `baton`."""

from __future__ import annotations

import sys

from baton_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
