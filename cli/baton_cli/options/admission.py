"""A router's admission flags: the tenants' limits, and how calls queue while all nodes are full.

RouterOptions and UpOptions include them (see `records`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton_cli.options.flag import flag


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions:
    TITLE: ClassVar[str] = "admission"

    tenants: str = flag("", "TOML: what each tenant may (default: all it wants)", metavar="FILE")
    admin_key: str = flag(
        "",
        "opens /pool, /metrics and /nodes, as do keys of the file marked admin (by the variable)",
        metavar="WORD",
        secret=True,
    )
    admission_queue_ms: float = flag(
        1000.0,
        "a node with prompts for so long before it is full, and requests wait in the router while"
        " all are; 0: none waits there",
        metavar="MS",
        least=0,
    )
    max_inflight: int = flag(
        0, "sequences that fill a node; 0: as many as it computes at once", least=0
    )
    max_queued: int = flag(1000, "calls that wait in the router to begin, at most", least=0)
    queue_timeout: float = flag(
        30.0, "how long a call waits there, at most", metavar="SECONDS", least=0.1
    )
    max_call_sequences: int = flag(
        2048, "sequences that one call may ask for: its prompts times n", least=1
    )
