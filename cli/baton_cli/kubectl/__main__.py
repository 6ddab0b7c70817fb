"""`python -m baton_cli.kubectl`."""

from __future__ import annotations

import sys

from baton_cli.kubectl.main import main

if __name__ == "__main__":
    sys.exit(main())
