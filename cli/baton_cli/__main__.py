"""`python -m baton_cli`, the same as `baton`; supervisors start their children with it."""

from __future__ import annotations

import sys

from baton_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
