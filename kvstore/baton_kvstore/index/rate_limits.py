"""Budgets of tenants, shared by all routers of a pool: token buckets on the index.

A bucket fills at its rate up to its capacity. Who draws more than the capacity waits for a full one
and leaves a debt, so that nothing is too large for ever, and what passes over time is the rate.

In: a tenant's name, draws. Out: how long to wait, 0 where all were taken at once; or
StoreUnavailable. One script per call, by the index's own time. Use one Budgets per event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton_kvstore.connection.client import AsyncClient, ClosesItself
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.keys import budget_key, routers_key

# KEYS: the budgets, the pool's routers. ARGV: "take" or "give", then rate per s, capacity and
# amount of each bucket. Numbers are written with 17 digits: Lua's own 14 would lose microseconds.
_DRAW = """
local t = redis.call('TIME')
local now = t[1] + t[2] / 1000000
local known = redis.call('HGETALL', KEYS[1])
local had = {}
for i = 1, #known, 2 do had[known[i]] = tonumber(known[i + 1]) end
if had.at and had.at > now then -- the server's clock was set back: the bucket fills from now on
  had.at = now
  redis.call('HSET', KEYS[1], 'at', string.format('%.17g', now))
end
local since = now - (had.at or now)
local levels, wait, full = {}, 0, 0
for i = 2, #ARGV, 3 do
  local rate, capacity, amount = tonumber(ARGV[i]), tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  if rate > 0 then
    local level = math.min(capacity, (had['b' .. i] or capacity) + since * rate)
    if ARGV[1] == 'take' then
      wait = math.max(wait, (math.min(amount, capacity) - level) / rate)
      level = level - amount
    else
      level = math.min(capacity, level + amount)
    end
    levels[i] = level
    full = math.max(full, (capacity - level) / rate)
  end
end
local routers = redis.call('ZCOUNT', KEYS[2], math.floor(now * 1000), '+inf')
if wait > 0 then return {string.format('%.17g', wait), routers} end
for i, level in pairs(levels) do
  redis.call('HSET', KEYS[1], 'b' .. i, string.format('%.17g', level))
end
redis.call('HSET', KEYS[1], 'at', string.format('%.17g', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(full * 1000) + 1000)
return {'0', routers}
"""


class Draw(NamedTuple):
    """`amount` of a bucket that fills at `rate_per_s` (0: it is never empty) up to `capacity`."""

    rate_per_s: float
    capacity: float
    amount: float


@dataclass(frozen=True, slots=True)
class DrawResult:
    """`wait_s` until the draws would be taken, 0: they are. `routers` share the budgets."""

    wait_s: float
    routers: int


class Budgets(ClosesItself):
    """Of one pool. A tenant's buckets are told apart by their order in the draws."""

    def __init__(self, url: str, pool: str, *, timeout_s: float) -> None:
        self._pool = pool
        self._client = AsyncClient(parse_endpoint(url), timeout_s=timeout_s)
        self._draw = self._client.redis.register_script(_DRAW)

    async def take(self, tenant: str, draws: Sequence[Draw]) -> DrawResult:
        """All of them, or none."""
        return await self._run("take", tenant, draws)

    async def give(self, tenant: str, draws: Sequence[Draw]) -> None:
        """Back, or, with amounts below 0, take whatever is left."""
        await self._run("give", tenant, draws)

    async def close(self) -> None:
        await self._client.close()

    async def _run(self, how: str, tenant: str, draws: Sequence[Draw]) -> DrawResult:
        keys = [budget_key(self._pool, tenant), routers_key(self._pool)]
        numbers = [repr(float(number)) for draw in draws for number in draw]
        wait_s, routers = await self._client.call(self._draw(keys=keys, args=[how, *numbers]))
        return DrawResult(float(wait_s), int(routers))
