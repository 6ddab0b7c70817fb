"""The Protocols between a runner, a model and an attention backend.

In: the step's batch and, per layer, rotated q and k, and v. Out: attention outputs. The new K and V
are written to the pool first, because a token attends to itself through the cache.

Shapes: T tokens of the step, R rows, M blocks of the longest row, N query heads, K kv heads,
H head_dim, V numbers of a head of v, B block size, P blocks of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Array = TypeVar("Array", npt.NDArray[Any], torch.Tensor)


@dataclass(frozen=True, slots=True)
class GroupArrays(Generic[Array]):
    """Where the layers of one KV group (see KVLayout) have a step's KV.

    `table_RM` has each row's blocks, with any strides; entries of tokens that the row does not
    have, or that the group's window has left, may be any block. `slots_T` is where each new token's
    K and V go: block * B + offset in the block, or -1 if they are not stored (int64).
    """

    table_RM: Array
    slots_T: Array


@dataclass(frozen=True, slots=True)
class StepArrays(Generic[Array]):
    """A step's rows as arrays (int32, if not said otherwise).

    Row r has tokens [query_starts[r], query_starts[r + 1]) of the step. They are the last ones of
    the `seq_lens[r]` tokens that it attends to. `awaits_T` is the index of the previous step's
    sample that is the token, and -1 for a token that is known.
    """

    tokens_T: Array
    positions_T: Array
    awaits_T: Array
    query_starts_R1: Array
    seq_lens_R: Array
    groups: tuple[GroupArrays[Array], ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of a step, of prompts and of decoding sequences alike, built once for all layers and
    backends. One-token rows come first, longest first.

    `device` has the numbers of `host` on the device. `max_query_len` and `max_seq_len` are the
    largest numbers of new and of all tokens of a row, or limits for them if the batch is recorded.
    """

    host: StepArrays[npt.NDArray[Any]]
    device: StepArrays[torch.Tensor]
    max_query_len: int
    max_seq_len: int

    @property
    def rows(self) -> int:
        return len(self.device.seq_lens_R)

    @property
    def one_token_rows(self) -> int:
        if self.max_query_len == 1:
            return self.rows
        return int(np.count_nonzero(np.diff(self.host.query_starts_R1) == 1))


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a batch, for one KV group: `count` new tokens from position `start` on."""

    start: int
    count: int
    blocks: npt.NDArray[np.int32]  # [M]


def table_rows(batch: StepBatch, group: int) -> list[TableRow]:
    """The rows of a batch, for backends that plan a step on the host."""
    host = batch.host
    counts = np.diff(host.query_starts_R1)
    starts = (host.seq_lens_R - counts).tolist()
    table_RM = host.groups[group].table_RM
    return [TableRow(*fields) for fields in zip(starts, counts.tolist(), table_RM, strict=True)]


@dataclass(frozen=True, slots=True)
class Exponents:
    """The exponents of rows of codes (see kv.eight_bits), int8 views of the pool. Those of a latent
    layer are the same for K and for V."""

    k_PKB1: torch.Tensor
    v_PKB1: torch.Tensor


@dataclass(frozen=True, slots=True)
class KVSlots:
    """Where a step's tokens have their KV of one layer: K of token t at k[s // B, :, s % B], with
    s = slots_T[t], and V at the same place of v. The KV of a token with a negative slot is not
    stored. Both are views of the pool (see `layer_kv`). If these are codes, the exponent of each
    row is at the same place of `exponents`. With `rounds`, K and V are stored as
    `eight_bits.rounded` has them in int8 (see KVLayout.codec)."""

    k_PKBH: torch.Tensor
    v_PKBV: torch.Tensor
    slots_T: torch.Tensor  # int64
    exponents: Exponents | None = None
    rounds: bool = False


class StepAttention(Protocol):
    """Attention of one step, called by each layer in turn."""

    def slots(self, layer: int) -> KVSlots:
        """The slots of the step's tokens, for kernels that store K and V themselves."""
        ...

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKV: torch.Tensor | None,
        *,
        stored: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store K and V, unless a kernel already has (`stored`), and return the attention outputs
        [T, N, V]. v is None if the layer keeps latent rows, which are k. `sinks_N` are the sinks of
        a layer that has them (see AttentionSpec), float32."""
        ...


class AttentionBackend(Protocol):
    @property
    def exact(self) -> bool:
        """Whether the bits of a query's output depend only on the query and the keys it sees."""
        ...

    @property
    def recordable(self) -> bool:
        """Whether steps may be recorded as CUDA graphs: begin() uses only the batch's device arrays
        and limits. Such a backend reads no KV that no token has written."""
        ...

    def begin(self, batch: StepBatch) -> StepAttention:
        """Prepare a step. Backends may compute neighbouring one-token rows together."""
        ...
