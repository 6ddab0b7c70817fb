"""Sizes, times and rates of the data plane, and what its instances share."""

from __future__ import annotations

from dataclasses import dataclass

from baton_kvstore.connection.server_settings import CareMode
from baton_kvstore.data.staging import StagingPool
from baton_kvstore.data.transfer_rate import RateMeter
from baton_kvstore.keys import DEFAULT_TTL_S
from baton_protocol.ids import Fingerprint

PROBE_CHUNKS = 4  # that a server without room is asked to take


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes, times and rates of the data plane. Bytes, seconds, bytes per second."""

    threads_per_instance: int = 2
    max_inflight_bytes: int = 64 << 20
    ttl_base_s: float = DEFAULT_TTL_S
    connect_timeout_s: float = 1.0
    deadline_base_s: float = 2.0
    floor_bytes_per_s: float = 8 << 20
    queue_limit_s: float = 30.0
    backoff_first_s: float = 0.1
    backoff_limit_s: float = 0.5
    idle_check_s: float = 0.5

    def deadline_s(self, size: int) -> float:
        """base + bytes / floor rate: what a transfer of `size` bytes may take. 1 MiB: 2.125 s."""
        return self.deadline_base_s + size / self.floor_bytes_per_s

    def settled_s(self, size: int) -> float:
        """By when an operation of `size` bytes has settled: the longest wait in the queue, the
        longest that its thread may be at when that is over (a probe), and its own transfer."""
        return self.queue_limit_s + self.deadline_s(PROBE_CHUNKS * size) + self.deadline_s(size)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the instances of one data plane share. `settings`: None leaves the servers' alone."""

    staging: StagingPool
    fingerprint: Fingerprint
    value_bytes: int
    shards: int  # values of one chunk
    puts: RateMeter
    gets: RateMeter
    tuning: Tuning
    settings: CareMode | None
