"""Draws how much of the allocated KV is filled, over the time of a run.

In: samples of the cache. Out: an SVG document. The distance between the two lines is the waste.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_cli.bench.run import CacheUse
from baton_cli.bench.svg_chart import Spot, line_chart


def kv_chart(looks: Sequence[CacheUse], title: str) -> str:
    lines = {
        "held by requests": [Spot(look.at, look.allocated) for look in looks],
        "filled": [Spot(look.at, look.allocated - look.empty) for look in looks],
    }
    return line_chart(title, "seconds", "KV cache, token slots", lines)
