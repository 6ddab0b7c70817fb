"""python -m benchmarks.gpu [--budget SECONDS] [--dry] [--out FOLDER] [--parts NAME ...]"""

from __future__ import annotations

import sys

from benchmarks.gpu.harness import main
from benchmarks.gpu.parts import PARTS

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PARTS))
