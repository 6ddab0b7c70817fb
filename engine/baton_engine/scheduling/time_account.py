"""Seconds of steps, by why they were needed: of one tenant, or of one of its requests.

The causes are those of `baton_protocol.usage`. The step loop makes a request's account and reads
it; the engine adds to it (see `baton_engine.core.step_time`).
"""

from __future__ import annotations


class TimeAccount:
    """Seconds by cause. `tenant` is the account of the request's tenant, or this one itself."""

    __slots__ = ("decode", "evicted", "lost", "prefill", "tenant")

    def __init__(self, tenant: TimeAccount | None = None) -> None:
        self.prefill = self.decode = self.lost = self.evicted = 0.0
        self.tenant = self if tenant is None else tenant
