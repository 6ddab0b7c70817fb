"""Identifier types, so that mypy catches one identifier used as another."""

from typing import NewType

RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)
# Start id of a node's engine process. Every message about a node carries it, so that a restarted
# node inherits nothing.
Epoch = NewType("Epoch", str)
# 16 bytes that name a block by every token before and in it (see `hashing`).
BlockHash = NewType("BlockHash", bytes)
# 32 hex characters (see `fingerprint`).
Fingerprint = NewType("Fingerprint", str)
# Index of a physical block in one node's KV pool. 0 is padding and is never allocated.
BlockId = NewType("BlockId", int)
