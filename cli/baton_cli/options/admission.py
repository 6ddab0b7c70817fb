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

    tenants: str = flag(
        "", "TOML file with the limits of each tenant (default: no limits)", metavar="FILE"
    )
    admin_key: str = flag(
        "",
        "key for /pool, /metrics and /nodes, in addition to keys marked admin (use the variable)",
        metavar="WORD",
        secret=True,
    )
    admission_queue_ms: float = flag(
        1000.0,
        "milliseconds of queued prompts that fill a node; while all nodes are full, requests wait"
        " in the router; 0: none waits there",
        metavar="MS",
        least=0,
    )
    max_inflight: int = flag(
        0, "number of sequences that fill a node; 0: as many as it computes at once", least=0
    )
    max_queued: int = flag(
        1000, "maximum number of calls that wait in the router to start", least=0
    )
    queue_timeout: float = flag(
        30.0, "maximum seconds that a call waits to start", metavar="SECONDS", least=0.1
    )
    max_call_sequences: int = flag(
        2048, "maximum number of sequences of one call: its prompts times n", least=1
    )
