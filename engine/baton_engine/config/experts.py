"""What ModelConfig says of a mixture of experts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How the router's logits become weights. "softmax" and "sigmoid": of all experts, before the best
# are chosen. "softmax_of_chosen": the best logits are chosen first.
Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a model. Each is a gated MLP with `size` inner numbers, and a token is
    computed by `top_k` of them.

    `layers` has one entry per decoder layer: whether it has experts or one dense MLP. With
    `choice_bias`, a learned bias per expert is added to the scores that choose, and not to the
    weights. With more than one of `groups`, only the experts of the best `top_groups` groups may be
    chosen; a group's score is its best one ("max") or the sum of its two best ones ("two_best").
    The chosen weights are divided by their sum with `renormalize`, and multiplied by `scale`.

    `shared_size` is the inner size of the MLP that computes every token beside the chosen experts,
    0 if there is none; with `shared_gate`, its output is multiplied by a sigmoid of a product of
    its input. With `float32_router`, the router's weight and product are float32 in any dtype.

    With `bias`, the products of the router and of the experts have one. With `swiglu_limit`, an
    expert has gpt-oss' gate (see layers.experts.ClampedSwiGLU), of which `swiglu_alpha` is part.
    """

    num_experts: int
    top_k: int
    size: int
    layers: tuple[bool, ...]
    scoring: Scoring
    renormalize: bool
    scale: float = 1.0
    choice_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "two_best"] = "max"
    shared_size: int = 0
    shared_gate: bool = False
    float32_router: bool = False
    bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
