"""Tuning: the sizes, times and rates of the data plane."""

from __future__ import annotations

from dataclasses import dataclass

from baton_kvstore.keys import DEFAULT_TTL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes, times and rates of the data plane."""

    threads_per_instance: int = 2
    max_inflight_bytes: int = 64 << 20  # total size of staging buffers
    ttl_base_s: float = DEFAULT_TTL_S  # lifetime of a chunk at the head of its chain
    connect_timeout_s: float = 1.0
    deadline_base_s: float = 2.0  # see deadline_s()
    floor_bytes_per_s: float = 8 << 20  # the slowest acceptable rate, see deadline_s()
    queue_limit_s: float = 30.0  # an operation that waited longer is refused
    backoff_first_s: float = 0.1  # first and longest pause between probes of a server
    backoff_limit_s: float = 0.5
    idle_check_s: float = 0.5  # interval between checks of an idle server

    def deadline_s(self, size: int) -> float:
        """Seconds that a transfer of `size` bytes may take: base + size / floor rate (2.125 s for 1
        MiB)."""
        return self.deadline_base_s + size / self.floor_bytes_per_s
