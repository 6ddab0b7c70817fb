"""Choose each token's experts from the router's logits.

Shapes: T tokens of the step, E experts, C experts chosen by a token, U groups of experts.
Source of the rules: the models' published code (softmax: Mixtral and Qwen; sigmoid with a bias
for the choice and the two best of a group: DeepSeek V3; the best of a group: DeepSeek V2; softmax
of the chosen: gpt-oss).
"""

from __future__ import annotations

import torch

from baton_engine.config.experts import ExpertsConfig
from baton_engine.layers.experts import Routes

# Added to the sum that weights are divided by, as DeepSeek V3 does.
LEAST_SUM = 1e-20


def choose_experts(
    logits_TE: torch.Tensor, config: ExpertsConfig, bias_E: torch.Tensor | None = None
) -> Routes:
    """The routes of each token from float32 logits. Rows do not depend on each other. `bias_E`
    belongs to `config.choice_bias`."""
    scores_TE = logits_TE
    if config.scoring == "softmax":
        scores_TE = logits_TE.softmax(-1)
    elif config.scoring == "sigmoid":
        scores_TE = sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if config.groups > 1:
        choice_TE = _best_groups_only(choice_TE, config)
    chosen_TC = choice_TE.topk(config.top_k, dim=-1).indices.sort(dim=-1).values
    weights_TC = scores_TE.gather(1, chosen_TC)
    if config.scoring == "softmax_of_chosen":
        weights_TC = weights_TC.softmax(-1)
    if config.renormalize:
        weights_TC = weights_TC / (weights_TC.sum(-1, keepdim=True) + LEAST_SUM)
    return Routes(chosen_TC, weights_TC * config.scale)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)). On a CPU, torch.sigmoid computes the last numbers of a tensor with other
    instructions, so that a number's bits depend on its place; softmax treats each pair alike."""
    return torch.stack([torch.zeros_like(x), x], -1).softmax(-1)[..., 1]


def _best_groups_only(choice_TE: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    """The scores with -inf for the experts of all but the best groups."""
    by_group = choice_TE.view(len(choice_TE), config.groups, -1)
    if config.group_score == "max":
        group_TU = by_group.amax(-1)
    else:
        group_TU = by_group.topk(2, dim=-1).values.sum(-1)
    best = group_TU.topk(config.top_groups, dim=-1).indices
    hidden_TU = torch.ones_like(group_TU, dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(hidden_TU[..., None], -torch.inf).view(choice_TE.shape)
