"""Bounds of what processes tell each other, as types of the records' fields.

What a record's decoder does not find within them (NaN, infinity, a negative count, an absurd size)
is refused with the whole record, at the edge: nothing behind a decoder needs to ask again. The
bounds are far above what is true anywhere, and low enough that sums and products of such figures
are finite.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton_protocol.ids import BlockHash, NodeId

MOST = 2**53  # whole numbers up to it are exact as floats

Count = Annotated[int, Meta(ge=0, le=MOST)]
Size = Annotated[int, Meta(ge=1, le=1 << 20)]  # of a dimension, or tokens of a block
Tokens = Annotated[int, Meta(ge=1, le=2**31)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]
PerSecond = Annotated[float, Meta(ge=0, le=1e15)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
# A node's name is part of headers, URLs and log lines.
NAME = r"^[!-~]{1,253}\Z"
Name = Annotated[NodeId, Meta(pattern=NAME)]
Text = Annotated[str, Meta(max_length=4096)]
Url = Annotated[str, Meta(max_length=2048)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Hash = Annotated[BlockHash, Meta(min_length=1, max_length=64)]
