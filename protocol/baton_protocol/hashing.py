"""Names of blocks: a chain of digests over everything that determines a block's KV.

    root = H(fingerprint, adapter digest or "", tenant_salt)
    h[0] = H(root, tokens[0:B], extra[0]),  h[i] = H(h[i-1], tokens[iB:(i+1)B], extra[i])

H is SHA-256 truncated to 128 bits over length-framed little-endian bytes, so that no two different
inputs give the same bytes and every process on every machine computes the same name. Only full
blocks have one. A chunk is named by the hash of its last block.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from array import array
from collections.abc import Sequence

from baton_protocol.ids import BlockHash, Fingerprint

HASH_BYTES = 16


def _length(part: bytes) -> bytes:
    return struct.pack("<I", len(part))


def _digest(*parts: bytes) -> BlockHash:
    framed = b"".join(_length(part) + part for part in parts)
    return BlockHash(hashlib.sha256(framed).digest()[:HASH_BYTES])


def tenant_salt(server_secret: bytes, tenant: str) -> str:
    """Salt of an authenticated tenant; never taken from a request's body."""
    return hmac.new(server_secret, tenant.encode(), hashlib.sha256).hexdigest()[:32]


def root_hash(fingerprint: Fingerprint, adapter: str = "", salt: str = "") -> BlockHash:
    """Root of the chain of one (model, adapter, tenant)."""
    return _digest(fingerprint.encode(), adapter.encode(), salt.encode())


def _token_bytes(tokens: Sequence[int]) -> bytes:
    # Through iter(): array would take bytes as packed words. Ids outside 0..2^32-1 overflow.
    packed = array("I", iter(tokens))
    if packed.itemsize != 4:
        raise RuntimeError("unsigned int is not 4 bytes on this platform")
    if struct.pack("=I", 1) != struct.pack("<I", 1):
        packed.byteswap()
    return packed.tobytes()


def extend_hashes(
    parent: BlockHash,
    tokens: Sequence[int],
    block_size: int,
    extra: Sequence[bytes] | None = None,
) -> list[BlockHash]:
    """Hashes of the full blocks in `tokens`, chained to `parent` (a root or the last block's hash).

    `extra[i]` names what else block i depends on (images, later); absent means empty.
    """
    hashes: list[BlockHash] = []
    data = _token_bytes(tokens)
    width = 4 * block_size
    # _digest(parent, block, more), with the two lengths that never change framed once: half the
    # time of a long prompt's chain.
    before, between = _length(parent), struct.pack("<I", width)
    for index in range(len(tokens) // block_size):
        more = extra[index] if extra is not None else b""
        block = data[index * width : (index + 1) * width]
        framed = before + parent + between + block + _length(more) + more
        parent = BlockHash(hashlib.sha256(framed).digest()[:HASH_BYTES])
        hashes.append(parent)
    return hashes


def chunk_hashes(block_hashes: Sequence[BlockHash], chunk_blocks: int) -> list[BlockHash]:
    """Names of the full chunks: every `chunk_blocks`-th block hash."""
    return list(block_hashes[chunk_blocks - 1 :: chunk_blocks])
