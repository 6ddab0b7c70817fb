"""The process of one part of `make gpu`.

    python -m benchmarks.gpu.child MODULE FILE --ready FILE --limit SECONDS --end SECONDS ...

In: the part's module, the file of its findings, its limit, and the bounds that `card` measured (as
JSON). Out: the findings. It makes the file `ready` when the imports are done: on a machine where
nobody has read torch's 5 GB yet they take longer than some parts, and do not count.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

from benchmarks.gpu.findings import Findings


def main() -> None:
    options = parse_options()
    module = importlib.import_module(options.module)
    import torch  # after a module that fails at once

    device = torch.device("cpu" if options.dry else "cuda")
    if not options.dry:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    options.ready.touch()
    module.run(
        Findings(
            path=options.file,
            device=device,
            dry=options.dry,
            deadline=min(time.monotonic() + options.limit, options.end),
            ceilings=json.loads(options.ceilings),
        )
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module")
    parser.add_argument("file", type=Path)
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--end", type=float, required=True, help="a time.monotonic()")
    parser.add_argument("--ceilings", default="{}")
    parser.add_argument("--dry", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
