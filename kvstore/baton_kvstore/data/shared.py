"""Shared: what the data instances of one data plane have in common."""

from __future__ import annotations

from dataclasses import dataclass

from baton_kvstore.data.rate_meter import RateMeter
from baton_kvstore.data.staging_pool import StagingPool
from baton_kvstore.data.tuning import Tuning
from baton_protocol.ids import Fingerprint
from baton_protocol.policies import StoreCare


@dataclass(frozen=True, slots=True)
class Shared:
    """What the instances of one data plane share. `settings` None leaves the servers' settings
    alone."""

    staging: StagingPool
    fingerprint: Fingerprint
    value_bytes: int  # header and payload of one head shard, with the blocks of all groups
    shards: int  # values per chunk
    puts: RateMeter
    gets: RateMeter
    tuning: Tuning
    settings: StoreCare | None
