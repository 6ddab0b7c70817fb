"""Identifiers that must not be mixed up."""

from typing import NewType

RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)
# A node's engine start id: anything said about a node carries it, so a restart inherits nothing.
Epoch = NewType("Epoch", str)
# 16 bytes naming a block by every token before and in it (see `hashing`).
BlockHash = NewType("BlockHash", bytes)
# 32 hex characters (see `fingerprint`).
Fingerprint = NewType("Fingerprint", str)
# Index of a physical block in one node's KV pool; 0 is padding and never handed out.
BlockId = NewType("BlockId", int)
