"""What an engine has to hold and to compute, and the memory of a device for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton_engine.config.model_config import ModelConfig
from baton_protocol.layout import ITEM_BYTES, KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes measured on the device after the weights were loaded: what this process keeps
    (`resident`), and what the largest step took in addition (`step`)."""

    resident: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelDemand:
    """A draft model. Its KV is in blocks of its own."""

    config: ModelConfig
    layout: KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDemand:
    """Bytes of a head that drafts: of its weights, of its KV per block of the pool, and for each of
    `max_num_seqs` sequences and of `max_batched_tokens` tokens. `returned` is how many numbers the
    target returns of a token in addition."""

    weights: int = 0
    block: int = 0
    sequence: int = 0
    token: int = 0
    returned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """What an engine has to hold and to compute.

    `dtype` is that of weights and of the tensors of a step; the KV's are in the layout.
    `kv_memory` (bytes) or `kv_blocks` is given for a pool of fixed size. Without `max_model_len`,
    the limit is what the pool can hold, and at most `longest`. `measured` bytes replace the
    formulas, also those of the `draft_model` model.
    """

    config: ModelConfig
    layout: KVLayout
    dtype: str
    device: str  # "cpu" or "cuda"
    kernels: str  # "torch" or "triton"
    graphs: bool
    max_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None = None
    longest: int | None = None  # if a prompt must fit one step
    kv_memory: int | None = None
    kv_blocks: int | None = None
    measured: Measured | None = None
    draft_model: DraftModelDemand | None = None
    stored_splits: bool = False  # triton's kernels store splits (--batch-invariant on)
    head: HeadDemand = HeadDemand()

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, with those of a head."""
        return self.layout.block_bytes + self.head.block

    @property
    def pool_blocks(self) -> int | None:
        """Number of blocks of a pool of fixed size; None if the size was not given."""
        if self.kv_blocks is None and self.kv_memory is not None:
            return self.kv_memory // self.layout.block_bytes
        return self.kv_blocks

    @property
    def of_draft_model(self) -> MemoryDemand | None:
        """The draft model alone, in the same steps."""
        second = self.draft_model
        if second is None:
            return None
        return replace(
            self,
            config=second.config,
            layout=second.layout,
            graphs=self.graphs and second.config.bridge is None,
            measured=None,
            draft_model=None,
        )

    def draft_model_blocks(self, num_blocks: int) -> int:
        """Blocks of the draft model for as many tokens as `num_blocks` blocks hold."""
        assert self.draft_model is not None
        return num_blocks // self.layout.num_groups * self.draft_model.layout.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A device's memory, in bytes: in total, and held permanently by others. `share` is the part of
    the total that may be in use, by the engine and others together."""

    total: int
    others: int = 0
    share: float = 1.0

    @property
    def limit(self) -> int:
        return max(0, int(self.total * self.share) - self.others)
