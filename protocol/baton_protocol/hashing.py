"""Names of blocks and chunks: chained digests over everything that determines a block's KV.

    root = H(fingerprint, adapter digest or "", tenant_salt)
    h[0] = H(root, tokens[0:B], extra[0]),  h[i] = H(h[i-1], tokens[iB:(i+1)B], extra[i])

H is SHA-256 truncated to 128 bits. Its input is length-framed and little-endian: different inputs
never serialize to the same bytes, and every machine computes the same name. Only full blocks have
names. The name of a chunk is the hash of its last block.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import cast

from baton_protocol.ids import BlockHash, Fingerprint

HASH_BYTES = 16

BlockHasher = Callable[..., BlockHash]


def _length(part: bytes) -> bytes:
    return struct.pack("<I", len(part))


def _digest(*parts: bytes) -> BlockHash:
    framed = b"".join(_length(part) + part for part in parts)
    return BlockHash(sha256(framed).digest()[:HASH_BYTES])


def tenant_salt(server_secret: bytes, tenant: str) -> str:
    """Return the salt of an authenticated tenant; never derive it from a request's body."""
    return hmac.new(server_secret, tenant.encode(), sha256).hexdigest()[:32]


def root_hash(fingerprint: Fingerprint, adapter: str = "", salt: str = "") -> BlockHash:
    """Return the root of the hash chain of one (fingerprint, adapter, tenant salt)."""
    return _digest(fingerprint.encode(), adapter.encode(), salt.encode())


@lru_cache(maxsize=8)
def block_hasher(block_size: int) -> BlockHasher:
    """Return the function that hashes one full block.

    Its arguments are the hash before the block (a root or the previous block's hash), the block's
    `block_size` token ids, and optionally the digest of non-text input in the block. It raises
    OverflowError for a token id outside 0..2^32-1.
    """
    # Equals _digest(parent, block, extra), but packs all fixed-size parts in one call. An engine
    # that hashes block by block needs half the time.
    pack, width = struct.Struct(f"<I{HASH_BYTES}sI{block_size}II").pack, 4 * block_size

    def name(parent: BlockHash, block: Sequence[int], extra: bytes = b"") -> bytes:
        try:
            framed = pack(HASH_BYTES, parent, width, *block, len(extra)) + extra
        except struct.error as error:
            raise OverflowError(f"a token id is not in 0..{2**32 - 1}: {error}") from error
        return sha256(framed).digest()[:HASH_BYTES]

    return cast(BlockHasher, name)


def extend_hashes(
    parent: BlockHash,
    tokens: Sequence[int],
    block_size: int,
    extra: Sequence[bytes] | None = None,
) -> list[BlockHash]:
    """Return the hashes of the full blocks in `tokens`, chained to `parent`.

    `parent` is a root or the hash of the block before `tokens`. `extra[i]` identifies non-text
    input of block i (for images, later); None means that no block has any.
    """
    name = block_hasher(block_size)
    hashes: list[BlockHash] = []
    for index in range(len(tokens) // block_size):
        block = tokens[index * block_size : (index + 1) * block_size]
        parent = name(parent, block, extra[index] if extra is not None else b"")
        hashes.append(parent)
    return hashes


def chunk_hashes(block_hashes: Sequence[BlockHash], chunk_blocks: int) -> list[BlockHash]:
    """Return the names of the full chunks: every `chunk_blocks`-th block hash."""
    return list(block_hashes[chunk_blocks - 1 :: chunk_blocks])
