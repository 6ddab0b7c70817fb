"""Read a Hugging Face folder's config.json and generation_config.json into one ModelConfig.

In: the folder. Out: every number that the model code needs, or an error that names the unsupported
value. Both spellings of rope are read: `rope_theta` + `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5). No torch, because settings are checked before it is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from baton_engine.errors import ModelError, UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of an architecture that config.json does not contain: which biases exist, whether
    q and k are normalised per head, the default head_dim of its config class, and whether its
    layers may have sliding windows."""

    qkv_bias: bool | None = None  # None: `attention_bias` of the config decides
    output_bias: bool | None = None
    qk_norm: bool = False
    default_head_dim: int | None = None
    # "none": no layer has a window. "all": `sliding_window` applies to every layer. "switched":
    # `use_sliding_window` enables windows, for the layers in `layer_types` or, without that, for
    # the layers from `max_window_layers` on.
    windows: Literal["none", "all", "switched"] = "none"


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False, windows="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, output_bias=False, windows="switched"),
    "Qwen3ForCausalLM": Family(qk_norm=True, default_head_dim=128, windows="switched"),
}
FULL, SLIDING = "full_attention", "sliding_attention"
# Defaults of these families' config classes.
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


# Fields of ModelConfig that cannot change KV: nodes that differ only in these may exchange KV.
NO_KV_FIELDS = frozenset(
    {
        "eos_ids",  # ends an answer; no layer uses it
        # The checkpoint's stated dtype. The fingerprint already has each tensor's own dtype and, in
        # the KV layout, the dtype that this node computes in.
        "dtype",
    }
)
# Keys of config.json whose whole meaning is in ModelConfig. The fingerprint has the ModelConfig
# fields instead of these keys. A key that is missing here counts twice, which does no harm.
READ_KEYS = frozenset(
    {
        "architectures",
        "attention_bias",
        "head_dim",
        "hidden_act",  # silu, or swish, which is the same; anything else is refused
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
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "type",
    }
)
# Keys of config.json that cannot change KV.
NO_KV_KEYS = frozenset(
    {
        "_name_or_path",  # where the checkpoint was saved from
        "attention_dropout",  # training only
        "bos_token_id",  # requests have token ids, and no layer treats an id specially
        "eos_token_id",
        "pad_token_id",
        "dtype",  # see NO_KV_FIELDS; transformers 4 spells it torch_dtype
        "torch_dtype",
        "initializer_range",  # training only
        "transformers_version",  # which version wrote the file
        "use_cache",  # whether transformers keeps KV at all
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding settings. `factor` is used by the types linear and llama3, the last three
    fields by llama3 only."""

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


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
    # Keys of config.json that this file does not read, and their values as canonical JSON.
    unread: tuple[tuple[str, str], ...] = ()

    def canonical(self) -> str:
        """The config's part of the fingerprint: canonical JSON of every field except NO_KV_FIELDS,
        so a new field counts unless it is listed there.

        Two spellings of the same config give the same text, and so does a default that is given or
        omitted. The default of a key that this file does not read is unknown, so such a key counts
        as it is written.
        """
        counted = {name: value for name, value in asdict(self).items() if name not in NO_KV_FIELDS}
        return json.dumps(counted, sort_keys=True)


def read_config(folder: Path) -> ModelConfig:
    """Read the config of a model folder. Raises ModelError if the folder or its config.json is
    missing or invalid, and UnsupportedModel for an unsupported architecture or value."""
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; give a Hugging Face folder")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder} has no config.json; give a Hugging Face folder")
    values = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    architecture = _architecture(values)
    family = FAMILIES[architecture]
    _refuse_unsupported(values)
    fields = _Fields(values)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    attention_bias = bool(values.get("attention_bias", False))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", family.default_head_dim or hidden // heads),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings"),
        tied=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        rope=_rope(values),
        eos_ids=_eos_ids(generation, values),
        dtype=_checkpoint_dtype(values),
        windows=_windows(values, family),
        unread=_unread(values),
    )
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads "
            f"{config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise UnsupportedModel(f"head_dim {config.head_dim} is odd; rope needs an even one")
    return config


def compute_dtype(config: ModelConfig, wanted: str) -> str:
    """The compute dtype for the value of `--dtype`. With "auto", float16 checkpoints run in
    float32, which represents them exactly; bfloat16 would round their weights."""
    if wanted == "auto":
        return "float32" if config.dtype == "float16" else config.dtype
    return wanted


class _Fields:
    """Typed reads of config.json. Errors name a key that is missing or of the wrong type."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(
                f"config.json: {key} is {value!r}; expected an integer of at least {least}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"config.json: {key} is {value!r}; expected a positive number")
        return float(value)

    def _get(self, key: str, default: float | None) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json has no {key}")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}; expected an object")
    return values


def _architecture(values: Mapping[str, Any]) -> str:
    named = values.get("architectures") or []
    for name in named:
        if name in FAMILIES:
            return str(name)
    raise UnsupportedModel(
        f"architecture {', '.join(map(str, named)) or '(none named)'} is not supported; "
        f"supported: {', '.join(sorted(FAMILIES))}"
    )


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {values['hidden_act']!r} is not supported; only silu")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"quantization_config {method!r} is not supported")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if values.get(key):
            raise UnsupportedModel(f"{key} {values[key]}: mixture of experts is not supported")


def _windows(values: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    """The window of each layer, as in transformers."""
    fields = _Fields(values)
    layers = fields.integer("num_hidden_layers")
    kinds: Sequence[str] | None = values.get("layer_types")
    unknown = sorted(set(kinds or ()) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModel(f"layer_types {unknown} are not supported")
    if kinds is not None and len(kinds) != layers:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    window = _window(values, family)
    implied = _implied_kinds(values, family, layers, bool(window))
    if kinds is not None and kinds != implied and (family.windows != "switched" or not window):
        raise UnsupportedModel(
            f"layer_types {sorted(set(kinds))} do not fit sliding_window "
            f"{values.get('sliding_window')!r} of this architecture"
        )
    # A window as long as the model's maximum length hides no key.
    hides = window is not None and window < fields.integer("max_position_embeddings")
    if hides and family.windows == "none":
        raise UnsupportedModel(f"sliding_window {window} is not supported for this architecture")
    return tuple(window if hides and kind == SLIDING else None for kind in kinds or implied)


def _window(values: Mapping[str, Any], family: Family) -> int | None:
    """The value of `sliding_window`, or None if windows are disabled."""
    switched = family.windows == "all" or values.get(
        "use_sliding_window", family.windows != "switched"
    )
    assumed = None if family.windows == "none" else DEFAULT_WINDOW
    if not switched or not values.get("sliding_window", assumed):
        return None
    return _Fields(values).integer("sliding_window", assumed)


def _implied_kinds(
    values: Mapping[str, Any], family: Family, layers: int, windowed: bool
) -> list[str]:
    """The default of `layer_types`."""
    if not windowed or family.windows == "none":
        return [FULL] * layers
    if family.windows == "all":
        return [SLIDING] * layers
    first = _Fields(values).integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0)
    return [SLIDING if layer >= first else FULL for layer in range(layers)]


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    spelled: dict[str, Any] = dict(values.get("rope_scaling") or {})
    spelled.update(values.get("rope_parameters") or {})
    fields = _Fields({"rope_theta": values.get("rope_theta"), **spelled})
    kind = str(spelled.get("rope_type") or spelled.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    partial = spelled.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; only 1")
    theta = fields.number("rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(type=kind, theta=theta)
    if kind == "linear":
        return RopeConfig(type=kind, theta=theta, factor=fields.number("factor"))
    return RopeConfig(
        type=kind,
        theta=theta,
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_positions=fields.integer(
            "original_max_position_embeddings", values.get("max_position_embeddings")
        ),
    )


def _unread(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The keys of config.json, as canonical JSON, that this file does not read and that may change
    KV."""
    unread = {key: values[key] for key in values.keys() - READ_KEYS - NO_KV_KEYS}
    for part in ("rope_scaling", "rope_parameters"):
        spelled = values.get(part) or {}
        # Both are spellings of the same setting.
        unread |= {f"rope.{key}": spelled[key] for key in spelled.keys() - READ_ROPE_KEYS}
    return tuple((key, json.dumps(unread[key], sort_keys=True)) for key in sorted(unread))


def _eos_ids(generation: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS ids. generation_config.json has precedence, because chat models list their end-of-turn id
    only there."""
    for source in (generation, values):
        named = source.get("eos_token_id")
        if named is not None:
            ids = named if isinstance(named, list) else [named]
            return tuple(int(item) for item in ids)
    return ()


def _checkpoint_dtype(values: Mapping[str, Any]) -> str:
    """The checkpoint's dtype. transformers 5 writes `dtype`, transformers 4 wrote `torch_dtype`."""
    named = values.get("dtype") or values.get("torch_dtype") or "float32"
    dtype = str(named).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} of the checkpoint is not one of {DTYPES}")
    return dtype
