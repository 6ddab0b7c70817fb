"""Bounded field types for the records that processes exchange.

A decoder rejects a record if one of its fields is out of bounds (NaN, infinity, a negative count,
an absurd size), so code that handles decoded records needs no such checks. The bounds are far above
any real value, and low enough that sums and products of such values stay finite.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton_protocol.ids import BlockHash, NodeId

MOST = 2**53  # a float holds every whole number up to this one exactly

Count = Annotated[int, Meta(ge=0, le=MOST)]
Size = Annotated[int, Meta(ge=1, le=1 << 20)]  # a dimension, or the tokens of a block
Tokens = Annotated[int, Meta(ge=1, le=2**31)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]
PerSecond = Annotated[float, Meta(ge=0, le=1e15)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
# Printable ASCII without spaces: a node's name appears in headers, URLs and log lines.
NAME = r"^[!-~]{1,253}\Z"
Name = Annotated[NodeId, Meta(pattern=NAME)]
Text = Annotated[str, Meta(max_length=4096)]
Url = Annotated[str, Meta(max_length=2048)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Hash = Annotated[BlockHash, Meta(min_length=1, max_length=64)]
