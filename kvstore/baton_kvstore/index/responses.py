"""Answers that clients want to read or to continue later, kept on the index for a time.

A response is a hash of a tenant's own key, so no tenant finds another's. A tenant's responses, and
those of all, have a limit of bytes; the oldest go first. Sorted sets list them by the end of
their time, and one hash holds their sizes and the sums: "TENANT:ID", "=TENANT" for a tenant, "*"
for all. A value may grow while the response is being made, and is read from any byte on. A key of
its own says that a response is still being made: its router renews it, and others ask it by this
key to cancel.

Each method raises StoreUnavailable if the index fails. Use one Responses per event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton_kvstore.connection.client import OPERATION_TIMEOUT_S, AsyncClient, ClosesItself
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.keys import (
    response_key,
    response_lease_key,
    response_sizes_key,
    responses_key,
)

OVERHEAD_BYTES = 512  # of a response's entries in Redis, beside its values
_CANCEL = b"cancel"

# KEYS of both scripts: the responses of all, the sizes. The keys of one tenant's begin with the
# first, and so do those of the responses.
_ROOM = """
local function forget(member)
  local tenant = string.match(member, '^([^:]*):')
  local size = tonumber(redis.call('HGET', KEYS[2], member) or '0')
  redis.call('DEL', KEYS[1] .. ':' .. member)
  redis.call('ZREM', KEYS[1], member)
  redis.call('ZREM', KEYS[1] .. ':' .. tenant, member)
  redis.call('HDEL', KEYS[2], member)
  for _, sum in ipairs({'*', '=' .. tenant}) do
    if redis.call('HINCRBY', KEYS[2], sum, -size) <= 0 then redis.call('HDEL', KEYS[2], sum) end
  end
end
local function make_room(tenant, size, own, all, spared)
  for _, limit in ipairs({{KEYS[1] .. ':' .. tenant, '=' .. tenant, own}, {KEYS[1], '*', all}}) do
    while tonumber(redis.call('HGET', KEYS[2], limit[2]) or '0') + size > limit[3] do
      local oldest = redis.call('ZRANGE', limit[1], 0, 0)[1]
      if not oldest or oldest == spared then return false end
      forget(oldest)
    end
  end
  return true
end
"""
# ARGV: tenant, id, bytes of the response; then, to write it, its lifetime in ms, the limits of a
# tenant and of all in bytes, and its names and values.
_CHANGE = (
    _ROOM
    + """
local tenant, id, size = ARGV[1], ARGV[2], tonumber(ARGV[3])
local member, listed = tenant .. ':' .. id, KEYS[1] .. ':' .. tenant
if size == 0 then
  local known = redis.call('ZSCORE', KEYS[1], member)
  if known then forget(member) end
  return known and 1 or 0
end
local lifetime, own, all = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do
  forget(old)
end
if redis.call('ZSCORE', KEYS[1], member) then forget(member) end
if size > own or size > all then return 0 end
make_room(tenant, size, own, all, '')
local record = KEYS[1] .. ':' .. member
redis.call('HSET', record, unpack(ARGV, 7))
redis.call('PEXPIRE', record, lifetime)
for _, list in ipairs({KEYS[1], listed}) do
  redis.call('ZADD', list, now + lifetime, member)
  if redis.call('PTTL', list) < lifetime then redis.call('PEXPIRE', list, lifetime) end
end
redis.call('HSET', KEYS[2], member, size)
for _, sum in ipairs({'*', '=' .. tenant}) do redis.call('HINCRBY', KEYS[2], sum, size) end
if redis.call('PTTL', KEYS[2]) < lifetime then redis.call('PEXPIRE', KEYS[2], lifetime) end
return 1
"""
)
# ARGV: tenant, id, name of the value, byte from which on the data follows, data, and the limits of
# a tenant and of all in bytes.
_APPEND = (
    _ROOM
    + """
local tenant, start, data, own = ARGV[1], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local member, all = tenant .. ':' .. ARGV[2], tonumber(ARGV[7])
local record = KEYS[1] .. ':' .. member
local value = redis.call('HGET', record, ARGV[3])
if not value or #value < start then return 0 end
local more = start + #data - #value
if more <= 0 then return 1 end
local size = tonumber(redis.call('HGET', KEYS[2], member) or '0') + more
if size > own or size > all or not make_room(tenant, more, own, all, member) then return 0 end
redis.call('HSET', record, ARGV[3], string.sub(value, 1, start) .. data)
for _, sum in ipairs({member, '*', '=' .. tenant}) do redis.call('HINCRBY', KEYS[2], sum, more) end
return 1
"""
)
# KEYS: the response. ARGV: name of the value, its first byte and number of bytes to read.
_READ = """
local value = redis.call('HGET', KEYS[1], ARGV[1])
return value and string.sub(value, ARGV[2] + 1, ARGV[2] + ARGV[3])
"""


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """Seconds that a response is kept, and bytes of one tenant's responses and of all."""

    ttl_s: float
    tenant_bytes: int
    all_bytes: int


class Responses(ClosesItself):
    """The kept responses of one pool."""

    def __init__(
        self,
        url: str,
        pool: str,
        limits: ResponseLimits,
        *,
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._client = AsyncClient(parse_endpoint(url), timeout_s=timeout_s, max_connections=4)
        self._change = self._client.redis.register_script(_CHANGE)
        self._append = self._client.redis.register_script(_APPEND)
        self._read = self._client.redis.register_script(_READ)

    async def close(self) -> None:
        await self._client.close()

    async def put(self, tenant: str, id: str, values: Mapping[str, bytes]) -> bool:
        """Write a response, instead of an earlier one of this id. False: it is larger than all that
        the tenant may keep."""
        limits = self._limits
        size = OVERHEAD_BYTES + sum(map(len, values.values()))
        pairs = [part for pair in values.items() for part in pair]
        numbers = [max(1, int(limits.ttl_s * 1000)), limits.tenant_bytes, limits.all_bytes]
        return bool(await self._run(tenant, id, size, *numbers, *pairs))

    async def get(self, tenant: str, id: str, *names: str) -> list[bytes] | None:
        """The values of these names; None if the response is not kept, or lacks one."""
        key = response_key(self._pool, tenant, id)
        values: list[bytes | None] = await self._client.call(self._client.redis.hmget(key, names))
        found = [value for value in values if value is not None]
        return found if len(found) == len(names) else None

    async def append(self, tenant: str, id: str, name: str, start: int, data: bytes) -> bool:
        """Let a value go on with this data from byte `start` on; it loses no byte. False: there is
        no such response, no byte before `start`, or no room."""
        limits = self._limits
        done = self._append(
            keys=[responses_key(self._pool), response_sizes_key(self._pool)],
            args=[tenant, id, name, start, data, limits.tenant_bytes, limits.all_bytes],
        )
        return bool(await self._client.call(done))

    async def read(self, tenant: str, id: str, name: str, start: int, most: int) -> bytes | None:
        """At most this many bytes of a value from `start` on; None if there is no such value."""
        key = response_key(self._pool, tenant, id)
        piece: bytes | None = await self._client.call(
            self._read(keys=[key], args=[name, start, most])
        )
        return piece

    async def delete(self, tenant: str, id: str) -> bool:
        """Whether there was such a response."""
        return bool(await self._run(tenant, id, 0))

    async def lease(self, tenant: str, id: str, ttl_s: float) -> bool:
        """Say for `ttl_s` seconds that the response is being made. True: a client has asked to
        cancel it."""
        key, lifetime = response_lease_key(self._pool, tenant, id), max(1, int(ttl_s * 1000))
        pipeline = self._client.redis.pipeline(transaction=True)
        pipeline.set(key, b"", px=lifetime, nx=True)
        pipeline.pexpire(key, lifetime)
        pipeline.get(key)
        replies = await self._client.call(pipeline.execute())
        return bool(replies[-1] == _CANCEL)

    async def release(self, tenant: str, id: str) -> None:
        """The response is no longer being made."""
        await self._client.call(
            self._client.redis.delete(response_lease_key(self._pool, tenant, id))
        )

    async def is_leased(self, tenant: str, id: str) -> bool:
        """Whether a router is making the response."""
        key = response_lease_key(self._pool, tenant, id)
        return bool(await self._client.call(self._client.redis.exists(key)))

    async def cancel(self, tenant: str, id: str) -> bool:
        """Ask the router that makes the response to cancel it. False: none does."""
        key = response_lease_key(self._pool, tenant, id)
        reply = await self._client.call(self._client.redis.set(key, _CANCEL, xx=True, keepttl=True))
        return bool(reply)

    async def _run(self, tenant: str, id: str, size: int, *more: str | bytes | int) -> int:
        keys = [responses_key(self._pool), response_sizes_key(self._pool)]
        done = self._change(keys=keys, args=[tenant, id, size, *more])
        return int(await self._client.call(done))
