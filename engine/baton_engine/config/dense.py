"""Read the config.json of a dense decoder: what Llama-like families have in common. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton_engine.config.config_json import (
    MOST_LAYERS,
    ConfigFields,
    checkpoint_dtype,
    eos_ids,
    read_head_dim,
    shown,
    unread,
)
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.model_config import Activation, ModelConfig, RopeConfig
from baton_engine.config.rope import read_rope
from baton_engine.config.windows import Windows
from baton_engine.errors import UnsupportedModel

# Keys of config.json whose whole meaning is in ModelConfig. The fingerprint has the ModelConfig
# fields instead of these keys. A key that is missing here counts twice, which does no harm.
READ_KEYS = frozenset(
    {
        "architectures",
        "attention_bias",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",  # only 1: anything else is refused
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)
# The same for keys inside rope_scaling and rope_parameters.
READ_ROPE_KEYS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)
# The spellings of the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# The spellings of each activation. A gelu without "tanh" is another function.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """What config.json does not say, because it is fixed for a family: which biases exist (None:
    `attention_bias` or `mlp_bias` decides), whether q and k are normalised per head, which layers
    may have windows, and the defaults of the family's config class. Without a default of the
    number of KV heads it is the number of heads, and without one of head_dim the hidden size
    divided by the heads. With `whole_heads` the heads must divide the hidden size even if there is
    a head_dim, as transformers wants it.

    `activation_key` is the key that names the activation, and `activation` the only one supported.
    `rope` reads the rope settings, and `experts` those of a mixture of experts. A family that reads
    more keys names them in `more_keys` and `more_rope_keys`.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    whole_heads: bool = False
    default_tied: bool = False
    default_eps: float = 1e-6
    windows: Windows = field(default_factory=Windows)
    activation_key: str = "hidden_act"
    activation: Activation = "silu"
    rope: Callable[[Mapping[str, Any]], RopeConfig] = read_rope
    experts: Callable[[Mapping[str, Any]], ExpertsConfig] | None = None
    more_keys: frozenset[str] = frozenset()
    more_rope_keys: frozenset[str] = frozenset()

    @property
    def keys(self) -> frozenset[str]:
        """The keys of config.json that are not in ModelConfig.unread."""
        return READ_KEYS - {"hidden_act"} | {self.activation_key} | self.more_keys

    @property
    def rope_keys(self) -> frozenset[str]:
        return READ_ROPE_KEYS | self.more_rope_keys

    def read(self, values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """Raises ModelError or UnsupportedModel."""
        self._refuse_unsupported(values)
        fields = ConfigFields(values)
        heads = fields.integer("num_attention_heads")
        hidden = fields.integer("hidden_size")
        if self.whole_heads and hidden % heads:
            raise UnsupportedModel(
                f"hidden_size {hidden} is no multiple of num_attention_heads {heads}"
            )
        attention_bias = fields.flag("attention_bias", False)
        mlp_bias = fields.flag("mlp_bias", False)
        return ModelConfig(
            architecture=str(values["architectures"][0]),
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers", most=MOST_LAYERS),
            num_heads=heads,
            num_kv_heads=self._kv_heads(values, heads),
            head_dim=read_head_dim(values, self.default_head_dim),
            norm_eps=fields.number("rms_norm_eps", self.default_eps),
            max_positions=fields.integer("max_position_embeddings"),
            tied=fields.flag("tie_word_embeddings", self.default_tied),
            qkv_bias=attention_bias if self.qkv_bias is None else self.qkv_bias,
            output_bias=attention_bias if self.output_bias is None else self.output_bias,
            mlp_bias=mlp_bias if self.mlp_bias is None else self.mlp_bias,
            qk_norm=self.qk_norm,
            rope=self.rope(values),
            eos_ids=eos_ids(values, generation),
            dtype=checkpoint_dtype(values),
            windows=self.windows.read(values),
            activation=self.activation,
            experts=None if self.experts is None else self.experts(values),
            unread=unread(values, self.keys, self.rope_keys),
        )

    def _kv_heads(self, values: Mapping[str, Any], heads: int) -> int:
        default = self.default_kv_heads
        if default is None and values.get("num_key_value_heads") is None:
            return heads
        return ConfigFields(values).integer("num_key_value_heads", default)

    def _refuse_unsupported(self, values: Mapping[str, Any]) -> None:
        fields = ConfigFields(values)
        named = fields.text(self.activation_key)
        if named is not None and ACTIVATIONS.get(named) != self.activation:
            raise UnsupportedModel(
                f"{self.activation_key} {shown(named)} is not supported; only {self.activation}"
            )
        for key in EXPERT_COUNTS if self.experts is None else ():
            if values.get(key):
                raise UnsupportedModel(
                    f"{key} {shown(values[key])} is not supported for this architecture, which has "
                    "no experts"
                )
