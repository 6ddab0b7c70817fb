"""Read the experts of a config.json: what families with a mixture of experts share. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import MOST_LAYERS, ConfigFields
from baton_engine.config.dense import EXPERT_COUNTS
from baton_engine.config.experts import ExpertsConfig
from baton_engine.errors import ModelError

# The keys of config.json that have no effect but through the config of the experts, and those that
# matter only in training.
EXPERT_KEYS = frozenset(
    {
        *EXPERT_COUNTS,
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts_per_tok",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
    }
)
# The keys of read_grouped_experts(), beside EXPERT_KEYS.
GROUP_KEYS = frozenset(
    {
        "first_k_dense_replace",
        "n_group",
        "n_shared_experts",
        "routed_scaling_factor",
        "topk_group",
    }
)
# The keys of step_layers().
STEP_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers"})


def read_experts(
    values: Mapping[str, Any],
    layers: tuple[bool, ...],
    *,
    count: str = "num_experts",
    alias: str | None = None,
    size: str = "moe_intermediate_size",
    **others: Any,
) -> ExpertsConfig:
    """The experts of the given layers. `count` is the key of their number, `alias` another spelling
    that the family's config class knows, and `size` the key of the inner size. `others` are fields
    of the config whose values are fixed for a family, or which it has read. Raises ModelError."""
    fields = ConfigFields(values)
    spellings = sorted({count, alias or count})
    spelled = [key for key in spellings if values.get(key) is not None]
    # Without a number, the error names a key that is null, or else `count`.
    spelled = spelled or [key for key in spellings if key in values][:1] or [count]
    counts = {fields.integer(key) for key in spelled}
    if len(counts) > 1:
        raise ModelError(f"config.json: {' and '.join(spelled)} are {sorted(counts)}")
    experts = ExpertsConfig(
        num_experts=counts.pop(),
        top_k=fields.integer("num_experts_per_tok"),
        size=fields.integer(size),
        layers=layers,
        **{"scoring": "softmax", **others},
    )
    _check(experts, " and ".join(spelled))
    return experts


def read_grouped_experts(
    values: Mapping[str, Any], *, first: int, scale: float, groups: int, top_groups: int
) -> ExpertsConfig:
    """The experts of a model that chooses as DeepSeek V3 does: by sigmoids and a learned bias, from
    the best groups, beside a shared MLP. The arguments are the defaults of the family's config
    class; `first` is that of the first layer with experts. Raises ModelError."""
    fields = ConfigFields(values)
    return read_experts(
        values,
        later_layers(values, first),
        count="n_routed_experts",
        alias="num_local_experts",
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", scale),
        choice_bias=True,
        groups=fields.integer("n_group", groups),
        top_groups=fields.integer("topk_group", top_groups),
        group_score="two_best",
        shared_size=fields.integer("n_shared_experts", 1) * fields.integer("moe_intermediate_size"),
        float32_router=True,
    )


def all_layers(values: Mapping[str, Any]) -> tuple[bool, ...]:
    return (True,) * _layers(values)


def step_layers(values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""
    fields = ConfigFields(values)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers", least=0)
    layers = range(_layers(values))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def later_layers(values: Mapping[str, Any], default: int) -> tuple[bool, ...]:
    """The layers from `first_k_dense_replace` on have experts."""
    fields = ConfigFields(values)
    first = fields.integer("first_k_dense_replace", default, least=0)
    return tuple(layer >= first for layer in range(_layers(values)))


def _layers(values: Mapping[str, Any]) -> int:
    return ConfigFields(values).integer("num_hidden_layers", most=MOST_LAYERS)


def _check(experts: ExpertsConfig, count_key: str) -> None:
    """Raise ModelError unless top_k experts of the best groups exist."""
    count, groups, top_groups = experts.num_experts, experts.groups, experts.top_groups
    if count % groups:
        raise ModelError(
            f"config.json: {count} experts cannot be divided into n_group {groups} groups; "
            f"expected a {count_key} that is a multiple of it"
        )
    if top_groups > groups:
        raise ModelError(
            f"config.json: topk_group {top_groups} is more than the n_group {groups} groups"
        )
    if groups > 1 and experts.group_score == "two_best" and count // groups < 2:
        raise ModelError(
            f"config.json: n_group {groups} leaves one expert in a group; expected two or more "
            f"({count_key} is {count})"
        )
    open_to_choice = count // groups * top_groups
    if experts.top_k > open_to_choice:
        of_groups = f", topk_group {top_groups} of n_group {groups}" if groups > 1 else ""
        raise ModelError(
            f"config.json: num_experts_per_tok is {experts.top_k}; expected at most "
            f"{open_to_choice}, the experts that a token may choose from ({count_key} "
            f"{count}{of_groups})"
        )
