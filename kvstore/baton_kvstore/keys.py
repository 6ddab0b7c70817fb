"""How keys are spelt (DESIGN section 5) and how long chunks live.

In: fingerprints, hashes, pool and node names. Out: key bytes and TTLs in milliseconds. The braces
are hash tags: should someone run a cluster after all, a chunk's shards share a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_protocol.hashing import HASH_BYTES
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId

DEFAULT_TTL_S = 3600.0
HALF_DEPTH = 64.0


def chunk_key(fingerprint: Fingerprint, chunk: BlockHash, shard: int = 0) -> bytes:
    """data: one shard of one chunk."""
    return f"kv1:{fingerprint}:{{{chunk.hex()}}}:s{shard}".encode()


def marker_key(fingerprint: Fingerprint, chunk: BlockHash) -> bytes:
    """index: the chunk's commit marker."""
    return f"kv1:{fingerprint}:{{i}}:{chunk.hex()}".encode()


def marker_request(fingerprint: Fingerprint, chunks: Sequence[BlockHash]) -> bytes:
    """MGET of the chunks' marker keys, as it is sent. Made in one go: key by key takes thrice as
    long, and a prefix has hundreds."""
    start = marker_key(fingerprint, BlockHash(b""))
    head = b"\r\n$%d\r\n%b" % (len(start) + 2 * HASH_BYTES, start)
    keys = b"".join(chunks).hex("|", HASH_BYTES).encode().replace(b"|", head)
    return b"*%d\r\n$4\r\nMGET%b%b\r\n" % (len(chunks) + 1, head, keys)


def inbox_key(pool: str, node: NodeId, epoch: Epoch) -> bytes:
    """index: the stream one decode node reads."""
    return f"h1:{pool}:{node}:{epoch}".encode()


def probe_key(pool: str, node: NodeId, epoch: Epoch) -> bytes:
    """index: what a node writes to see whether the index takes writes."""
    return inbox_key(pool, node, epoch) + b":probe"


def room_key(fingerprint: Fingerprint) -> bytes:
    """data: what a node puts to see whether an instance takes chunks."""
    return f"kv1:{fingerprint}:room".encode()


def nodes_key(pool: str) -> bytes:
    """index: sorted set node -> expiry, so that nobody scans."""
    return f"n1:{pool}".encode()


def node_key(pool: str, node: NodeId) -> bytes:
    """index: one node's report."""
    return f"n1:{pool}:{node}".encode()


def fetches_key(pool: str) -> bytes:
    """index: the same for nodes that fetch their model."""
    return f"m1:{pool}".encode()


def fetch_key(pool: str, node: NodeId) -> bytes:
    """index: how far one node is with fetching its model."""
    return f"m1:{pool}:{node}".encode()


def routers_key(pool: str) -> bytes:
    """index: the same for routers, which say what clients ask of them."""
    return f"d1:{pool}".encode()


def router_key(pool: str, router: str) -> bytes:
    """index: one router's report."""
    return f"d1:{pool}:{router}".encode()


def budget_key(pool: str, tenant: str) -> bytes:
    """index: what is left of one tenant's budgets."""
    return f"b1:{pool}:{tenant}".encode()


def ttl_ms(depth: int, base_s: float = DEFAULT_TTL_S) -> int:
    """Lifetime of a chunk that is the `depth`-th of its chain (0 is the head), in milliseconds.

    base/2 * (1 + 1 / (1 + depth/64)): base at the head, strictly falling, never under base/2. So a
    chain's tail dies before its head, and a fresh hand-off never before older chunks of its depth.
    """
    share = 0.5 * (1.0 + 1.0 / (1.0 + max(0, depth) / HALF_DEPTH))
    return max(1, int(base_s * 1000.0 * share))
