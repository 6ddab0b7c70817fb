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
from baton_engine.config.latent import LatentConfig
from baton_engine.config.quantization.scheme import QuantizationConfig
from baton_protocol.layout import CODES, LATENT, KVField, in_codes, keys_and_values
from baton_protocol.pooling import Pooling

Activation = Literal["silu", "gelu_tanh"]
# The hidden state that is a text's vector: that of its last or its first token, or the mean of all.
Pooled = Literal["last", "cls", "mean"]

# Fields of ModelConfig that cannot change KV: nodes that differ only in these may exchange KV.
NO_KV_FIELDS = frozenset(
    {
        "eos_ids",  # ends an answer; no layer uses it
        # The checkpoint's stated dtype. The fingerprint already has each tensor's own dtype and, in
        # the KV layout or beside it, the dtype that this node computes in.
        "dtype",
        "unused_tensors",  # never loaded
        *("pooling", "classes", "pooled"),  # come after the layers
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding settings. `partial` is the part of each head that is rotated.

    `factor` is used by the types linear, llama3 and yarn, `original_max_positions` by the last two,
    and the factors of low and high frequencies by llama3 only. yarn divides by `factor` the
    frequencies that turn less than `beta_slow` times in `original_max_positions`, keeps those that
    turn more than `beta_fast` times, and interpolates between them, with bounds at whole
    frequencies if `truncate`. The type longrope divides each frequency by its long or short factor;
    `long` says which factors, see ModelConfig.limited_to. Both multiply cos and sin by
    `attention_factor`.
    """

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
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
    c tanh(score / c). For `window`, see ModelConfig.windows.

    Heads of q and k have `head_dim` numbers, and those of v `value_dim`, by default as many. With
    `latent`, the cache has one row per token and head: it is k, and its first numbers are v. With
    `sinks`, each query head has a learned score that takes part in the softmax as that of a key
    would, and has no value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    value_dim: int = 0
    latent: bool = False

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """A model that transformers' code computes (see `models.bridge`).

    `version` is that of transformers, `values` the config.json as transformers reads it, `weights`
    the number of parameters, and `backbone` the name of the module that computes hidden states.
    `layers` has one entry per call of attention, in the order of the calls; of an `encoder`, whose
    tokens see all tokens of their text, one per layer.
    """

    version: str
    values: str
    backbone: str
    weights: int
    layers: tuple[AttentionSpec, ...]
    encoder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model, or an encoder. `dtype` is the checkpoint's. Numbers and sizes of heads
    are those of every layer, or the largest ones of a layer if a `bridge` says that layers differ.

    `windows` has one entry per layer, or is empty if no layer has a window; None means no window.
    Key j is visible to the query at position i if j <= i and, in a layer with window w, j > i - w.

    Tensors of the checkpoint whose names begin with one of `unused_tensors` are not loaded, such as
    those of layers that only draft tokens.

    `pooling` is what the model answers with if it generates no tokens, and `classes` the number of
    its scores if that is "classify". A pooling model has no head. `pooled` is for "embed".
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
    attention_sinks: bool = False
    logits_soft_cap: float | None = None
    embed_scale: float = 1.0  # embeddings are multiplied by it
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None  # num_kv_heads and head_dim are then those of latent rows
    clip_qkv: float | None = None  # q, k and v are at most this and at least minus this
    unused_tensors: tuple[str, ...] = ()
    pooling: Pooling = ""
    classes: int = 0
    pooled: Pooled = "last"
    bridge: BridgeConfig | None = None
    quantization: QuantizationConfig | None = None  # None: plain weights
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
                sinks=self.attention_sinks,
                value_dim=0 if self.latent is None else self.latent.rank,
                latent=self.latent is not None,
            )
            for window in windows
        )

    @property
    def encodes(self) -> bool:
        """Whether it is an encoder: it has no KV, and computes a prompt in one step."""
        return self.bridge is not None and self.bridge.encoder

    @property
    def has_own_head(self) -> bool:
        """Whether the checkpoint has a head of its own, beside the embedding."""
        return not (self.tied or self.pooling)

    @property
    def vector_size(self) -> int:
        """Numbers of a pooling model's answer; 0 for other models."""
        if not self.pooling:
            return 0
        return self.classes if self.pooling == "classify" else self.hidden_size

    @property
    def rope_dim(self) -> int:
        """Numbers of a head of which rope rotates all or a part (see RopeConfig)."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def kv_fields(self, dtype: str) -> tuple[tuple[KVField, ...], ...]:
        """What each layer keeps of a token, if it is kept in this dtype; one entry per layer. A
        dtype of CODES has exponents beside the codes."""
        fields: tuple[tuple[KVField, ...], ...]
        if self.latent is not None:
            fields = ((KVField(LATENT, 1, self.latent.row, dtype),),) * self.num_layers
        else:
            fields = tuple(
                keys_and_values(spec.num_kv_heads, spec.head_dim, dtype) for spec in self.attention
            )
        return tuple(in_codes(kept, dtype) for kept in fields) if dtype in CODES else fields

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


def why_auto(config: ModelConfig) -> str:
    """Why "auto" is what it is, for the log."""
    if config.dtype == "float16":
        return "which has all numbers of the checkpoint's float16"
    return "as the checkpoint has"


def _needs_long(rope: RopeConfig, length: int) -> bool:
    return rope.type == "longrope" and length > rope.original_max_positions
