"""The format of all Redis keys, and the lifetime of chunks.

The first word of each docstring is the server role that holds the key: data or index. The braces
are hash tags: should someone run a Redis Cluster, all shards of a chunk share a slot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton_protocol.hashing import HASH_BYTES
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId

DEFAULT_TTL_S = 3600.0
HALF_DEPTH = 64.0
LONGEST_PIN_S = 7 * 86400


def chunk_key(fingerprint: Fingerprint, chunk: BlockHash, shard: int = 0) -> bytes:
    """data: one head shard of one chunk."""
    return f"kv1:{fingerprint}:{{{chunk.hex()}}}:s{shard}".encode()


def marker_key(fingerprint: Fingerprint, chunk: BlockHash) -> bytes:
    """index: the chunk's commit marker."""
    return f"kv1:{fingerprint}:{{i}}:{chunk.hex()}".encode()


def marker_request(fingerprint: Fingerprint, chunks: Sequence[BlockHash]) -> bytes:
    """Return the packed RESP command MGET for the chunks' marker keys. It is built in one pass:
    packing key by key takes three times as long, and a prefix has hundreds of chunks."""
    start = marker_key(fingerprint, BlockHash(b""))
    head = b"\r\n$%d\r\n%b" % (len(start) + 2 * HASH_BYTES, start)
    keys = b"".join(chunks).hex("|", HASH_BYTES).encode().replace(b"|", head)
    return b"*%d\r\n$4\r\nMGET%b%b\r\n" % (len(chunks) + 1, head, keys)


def inbox_key(pool: str, node: NodeId, epoch: Epoch) -> bytes:
    """index: the inbox of one decode node, a stream."""
    return f"h1:{pool}:{node}:{epoch}".encode()


def probe_key(pool: str, node: NodeId, epoch: Epoch) -> bytes:
    """index: a node writes this key to check that the index accepts writes."""
    return inbox_key(pool, node, epoch) + b":probe"


def room_key(fingerprint: Fingerprint) -> bytes:
    """data: the prefix of the keys that a node puts to check that an instance accepts chunks. They
    end in `:0`, `:1`, and so on."""
    return f"kv1:{fingerprint}:room".encode()


def nodes_key(pool: str) -> bytes:
    """index: sorted set of nodes, scored by expiry (Unix ms). It lists them without a SCAN."""
    return f"n1:{pool}".encode()


def node_key(pool: str, node: NodeId) -> bytes:
    """index: one node's NodeReport."""
    return f"n1:{pool}:{node}".encode()


def fetches_key(pool: str) -> bytes:
    """index: the sorted set of nodes that download their model, scored by expiry."""
    return f"m1:{pool}".encode()


def fetch_key(pool: str, node: NodeId) -> bytes:
    """index: one node's FetchReport, the progress of its model download."""
    return f"m1:{pool}:{node}".encode()


def routers_key(pool: str) -> bytes:
    """index: the sorted set of routers, scored by expiry."""
    return f"d1:{pool}".encode()


def router_key(pool: str, router: str) -> bytes:
    """index: one router's RouterReport."""
    return f"d1:{pool}:{router}".encode()


def budget_key(pool: str, tenant: str) -> bytes:
    """index: the fill levels of one tenant's rate limits."""
    return f"b1:{pool}:{tenant}".encode()


def pins_key(pool: str) -> bytes:
    """index: hash of the pinned prefixes' ids, each with the time of its last change (Unix ms)."""
    return f"p1:{pool}".encode()


def pin_key(pool: str, id: str) -> bytes:
    """index: one PinnedPrefix."""
    return f"p1:{pool}:{id}".encode()


def resume_key(pool: str, id: str) -> bytes:
    """index: a hash: how a stream that can be resumed began, and its owner's fence."""
    return f"r1:{pool}:{id}".encode()


def resume_log_key(pool: str, id: str) -> bytes:
    """index: the list of its entries."""
    return resume_key(pool, id) + b":log"


def responses_key(pool: str) -> bytes:
    """index: sorted set of the kept responses, `TENANT:ID`, scored by expiry (Unix ms). With a
    tenant's name after another colon: that of one tenant."""
    return f"rp1:{pool}".encode()


def response_key(pool: str, tenant: str, id: str) -> bytes:
    """index: one kept response, a hash."""
    return f"rp1:{pool}:{tenant}:{id}".encode()


def response_sizes_key(pool: str) -> bytes:
    """index: hash of the bytes of each kept response, and their sums."""
    return f"rs1:{pool}".encode()


def response_lease_key(pool: str, tenant: str, id: str) -> bytes:
    """index: a router makes this response in the background; `cancel` if it shall stop."""
    return f"rl1:{pool}:{tenant}:{id}".encode()


def lease_key(pool: str, name: str) -> bytes:
    """index: who holds the lease of this name."""
    return f"l1:{pool}:{name}".encode()


def decisions_key(pool: str) -> bytes:
    """index: sorted set of the planner's last decisions, scored by their time (Unix ms)."""
    return f"a1:{pool}".encode()


def ttl_ms(depth: int, base_s: float = DEFAULT_TTL_S, kept_until: int = 0) -> int:
    """Return the lifetime in milliseconds of the chunk at index `depth` of its chain (0: the head).

    base/2 * (1 + 1 / (1 + depth/64)): base at the head, strictly falling, never below base/2. So
    the tail of a chain expires before its head, and a new hand-off never expires before older
    chunks of the same depth. A chunk of a pinned prefix lives at least until `kept_until`, in Unix
    seconds by this machine's clock.
    """
    share = 0.5 * (1.0 + 1.0 / (1.0 + max(0, depth) / HALF_DEPTH))
    kept_s = min(kept_until - time.time(), LONGEST_PIN_S) if kept_until else 0.0
    return max(1, int(max(base_s * share, kept_s) * 1000.0))
