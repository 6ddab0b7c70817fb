"""Logs of resumable streams on the index, each written by one owner at a time.

A stream is a hash with its beginning and a fence, and a list of entries. Who claims the stream
raises the fence; an append with an older fence has no effect, so an earlier owner notices that it
lost the stream. All appends of one call travel as one command, whatever they do. Sending it twice
is the same as once, because each entry carries its position.

Every key expires when its stream was neither appended to nor renewed for its lifetime. Each method
raises StoreUnavailable if the index fails. Use one ResumeLog per event loop.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton_kvstore.connection.async_resp import AsyncResp
from baton_kvstore.connection.client import CONNECT_TIMEOUT_S, AsyncClient, ClosesItself
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp import Reply
from baton_kvstore.errors import ProtocolBroken, ServerRefused
from baton_kvstore.keys import resume_key, resume_log_key
from baton_protocol.resume import ResumeEntry, ResumeHead
from baton_protocol.wire import Codec, WireError

logger = logging.getLogger(__name__)

KEPT, GONE, FENCED = 1, 0, -1  # what became of an append
FIRST_FENCE = 1
BEGIN, DELETE = -2, -1  # positions of appends that are no entry
TIMEOUT_S = 1.0

# KEYS: the prefix of names. ARGV: a MessagePack list of appends (see Append, with the number of
# bytes instead of bytes), and all their bytes. Two arguments instead of five for each append,
# because packing one takes redis-py 1 us. Redis reads no MessagePack with bytes in it.
_APPEND = b"""
local results, from, all = {}, 1, true
for i, a in ipairs(cmsgpack.unpack(ARGV[1])) do
  local head = KEYS[1] .. a[1]
  local log = head .. ':log'
  local fence = redis.call('HGET', head, 'fence')
  local result, entry = 1, string.sub(ARGV[2], from, from + a[5] - 1)
  from = from + a[5]
  if a[3] == -2 and (not fence or tonumber(fence) == a[2]) then
    redis.call('HSET', head, 'fence', a[2], 'head', entry)
    redis.call('PEXPIRE', head, a[4])
  elseif not fence then result = 0
  elseif tonumber(fence) ~= a[2] then result = -1
  elseif a[3] == -1 then redis.call('DEL', head, log)
  else
    if a[5] > 0 then
      local length = redis.call('LLEN', log)
      if length == a[3] then redis.call('RPUSH', log, entry)
      elseif length < a[3] then result = 0 end
    end
    redis.call('PEXPIRE', head, a[4])
    redis.call('PEXPIRE', log, a[4])
  end
  results[i] = result
  all = all and result == 1
end
return all or table.concat(results, ' ')
"""
_SHA = hashlib.sha1(_APPEND, usedforsecurity=False).hexdigest().encode()
# KEYS: the stream's hash, its list. ARGV: lifetime in ms.
_CLAIM = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return {redis.call('HINCRBY', KEYS[1], 'fence', 1), redis.call('LRANGE', KEYS[2], 0, -1)}
"""


# A stream's id, fence, position, lifetime in ms, and its next entry. Without an entry it only
# renews the lifetime. At the position BEGIN, the bytes are the stream's head: the stream begins
# with this fence, or its owner replaces the head. DELETE deletes the stream. There may be an append
# per token, and a named tuple would take 0.3 us.
Append = tuple[str, int, int, int, bytes]


@dataclass(frozen=True, slots=True)
class Claim:
    """A stream that the caller owns now, its entries so far, and their bytes."""

    fence: int
    entries: list[ResumeEntry]
    size: int


class ResumeLog(ClosesItself):
    """The resumable streams of one pool."""

    def __init__(self, url: str, pool: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._pool = pool
        self._prefix = resume_key(pool, "")
        endpoint = parse_endpoint(url)
        self._client = AsyncClient(endpoint, timeout_s=timeout_s, max_connections=4)
        # Redis-py would take 150 us for a command with the tokens of one step.
        self._writes = AsyncResp(endpoint, timeout_s=timeout_s, connect_timeout_s=CONNECT_TIMEOUT_S)
        self._encoder = msgspec.msgpack.Encoder()
        self._claim = self._client.redis.register_script(_CLAIM)
        self._heads: Codec[ResumeHead] = Codec(ResumeHead)
        self._entries: Codec[ResumeEntry] = Codec(ResumeEntry)

    async def close(self) -> None:
        self._writes.close()
        await self._client.close()

    def encode_head(self, head: ResumeHead) -> bytes:
        return self._heads.encode(head)

    def encode(self, entry: ResumeEntry) -> bytes:
        return self._entries.encode(entry)

    async def append(self, appends: Sequence[Append]) -> list[int]:
        """Apply the appends in order. Return KEPT, GONE (expired or lost) or FENCED for each."""
        entries = [entry for _, _, _, _, entry in appends]
        packed = self._encoder.encode(
            [(id, fence, at, life, len(entry)) for id, fence, at, life, entry in appends]
        )
        reply = await self._run(packed, b"".join(entries))
        if reply == 1:  # mostly
            return [KEPT] * len(appends)
        results = [*map(int, reply.split())] if isinstance(reply, bytes) else []
        if len(results) != len(appends):
            raise ProtocolBroken(f"{self._client.label}: {len(appends)} appends got {reply!r}")
        return results

    async def _run(self, packed: bytes, entries: bytes) -> Reply:
        """Run the script, which is safe to run twice."""
        arguments = (b"1", self._prefix, packed, entries)
        try:
            return await self._writes.command(b"EVALSHA", _SHA, *arguments)
        except ServerRefused as error:
            if error.code != "NOSCRIPT":
                raise
            return await self._writes.command(b"EVAL", _APPEND, *arguments)

    async def head(self, id: str) -> ResumeHead | None:
        """How a stream began; None if there is none."""
        data: bytes | None = await self._client.call(
            self._client.redis.hget(resume_key(self._pool, id), "head")
        )
        try:
            return None if data is None else self._heads.decode(data)
        except WireError as error:
            logger.warning("index %s: %s", self._client.label, error)
            return None

    async def claim(self, id: str, lifetime_ms: int) -> Claim | None:
        """Become the stream's owner; None if there is none."""
        keys = [resume_key(self._pool, id), resume_log_key(self._pool, id)]
        found = await self._client.call(self._claim(keys=keys, args=[lifetime_ms]))
        if found is None:
            return None
        try:
            entries = [self._entries.decode(entry) for entry in found[1]]
            return Claim(int(found[0]), entries, sum(map(len, found[1])))
        except WireError as error:
            logger.warning("index %s: %s", self._client.label, error)
            return None
