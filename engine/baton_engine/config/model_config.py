"""ModelConfig: every number that the model code needs, read from a Hugging Face folder.

In: the folder's config.json and generation_config.json. Out: one ModelConfig, or an error that
names the unsupported value. The architecture's family reads the files (see `families`). No torch,
because settings are checked before it is imported.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

from baton_engine.config.experts import ExpertsConfig

Activation = Literal["silu", "gelu_tanh"]

# Fields of ModelConfig that cannot change KV: nodes that differ only in these may exchange KV.
NO_KV_FIELDS = frozenset(
    {
        "eos_ids",  # ends an answer; no layer uses it
        # The checkpoint's stated dtype. The fingerprint already has each tensor's own dtype and, in
        # the KV layout, the dtype that this node computes in.
        "dtype",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding settings. `partial` is the part of each head that is rotated.

    `factor` is used by the types linear and llama3, and the next three fields by llama3 only. The
    type longrope divides each frequency by its long or short factor, and multiplies cos and sin by
    `attention_factor`. `long` says which factors; see ModelConfig.limited_to.
    """

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    partial: float = 1.0
    long: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(head_dim * self.partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer. A score is q k^T * scale; with a `soft_cap` c it becomes
    c tanh(score / c). For `window`, see ModelConfig.windows."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """A model that transformers' code computes (see `models.bridge`).

    `version` is that of transformers, `values` the config.json as transformers reads it, `weights`
    the number of parameters, and `backbone` the name of the module that computes hidden states.
    `layers` has one entry per call of attention, in the order of the calls.
    """

    version: str
    values: str
    backbone: str
    weights: int
    layers: tuple[AttentionSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model. `dtype` is the checkpoint's.

    `windows` has one entry per layer, or is empty if no layer has a window; None means no window.
    Key j is visible to the query at position i if j <= i and, in a layer with window w, j > i - w.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    eos_ids: tuple[int, ...]
    dtype: str
    windows: tuple[int | None, ...] = ()
    activation: Activation = "silu"  # of the MLP's gate
    norms_after: bool = False  # the outputs of attention and MLP are normalised, too
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embed_scale: float = 1.0  # embeddings are multiplied by it
    experts: ExpertsConfig | None = None
    bridge: BridgeConfig | None = None
    # Keys of config.json that the family does not read, and their values as canonical JSON.
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """One entry per layer."""
        if self.bridge is not None:
            return self.bridge.layers
        windows = self.windows or (None,) * self.num_layers
        scale = self.attention_scale
        return tuple(
            AttentionSpec(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5 if scale is None else scale,
                window=window,
                soft_cap=self.attention_soft_cap,
            )
            for window in windows
        )

    def limited_to(self, max_model_len: int | None) -> ModelConfig:
        """The config of an engine whose sequences have at most this number of tokens; None means
        `max_positions`.

        A longrope model has factors for sequences up to `original_max_positions` tokens, and others
        for longer ones. KV cannot change its factors while its sequence grows, so the limit
        chooses them for all sequences.
        """
        rope = self.rope
        length = self.max_positions if max_model_len is None else max_model_len
        return replace(self, rope=replace(rope, long=_needs_long(rope, length)))

    def canonical(self) -> str:
        """The config's part of the fingerprint: canonical JSON of every field except NO_KV_FIELDS,
        so a new field counts unless it is listed there.

        Two spellings of the same config give the same text, and so does a default that is given or
        omitted. The default of a key that the family does not read is unknown, so such a key counts
        as it is written.
        """
        counted = {name: value for name, value in asdict(self).items() if name not in NO_KV_FIELDS}
        return json.dumps(counted, sort_keys=True)


def compute_dtype(config: ModelConfig, wanted: str) -> str:
    """The compute dtype for the value of `--dtype`. With "auto", float16 checkpoints run in
    float32, which represents them exactly; bfloat16 would round their weights."""
    if wanted == "auto":
        return "float32" if config.dtype == "float16" else config.dtype
    return wanted


def _needs_long(rope: RopeConfig, length: int) -> bool:
    return rope.type == "longrope" and length > rope.original_max_positions
