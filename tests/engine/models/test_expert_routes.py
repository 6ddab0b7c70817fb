"""The choice of a token's experts: the same bits in any batch, and the rules of each scoring."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton_engine.config.experts import ExpertsConfig
from baton_engine.layers.expert_routes import choose_experts, sigmoid


def experts(count: int, top_k: int, **others: Any) -> ExpertsConfig:
    usual: dict[str, Any] = {"scoring": "softmax", "renormalize": True, **others}
    return ExpertsConfig(num_experts=count, top_k=top_k, size=1, layers=(True,), **usual)


@pytest.mark.parametrize(
    "config",
    [
        experts(5, 3),
        experts(128, 8, renormalize=False),
        experts(7, 2, scoring="sigmoid", choice_bias=True, scale=2.5),
        experts(33, 4, scoring="softmax_of_chosen", renormalize=False),
        experts(12, 3, scoring="sigmoid", groups=4, top_groups=2, group_score="two_best"),
    ],
    ids=lambda config: f"{config.scoring} {config.top_k} of {config.num_experts}",
)
def test_a_token_has_the_same_routes_to_the_bit_in_any_batch(config: ExpertsConfig) -> None:
    torch.manual_seed(0)
    logits_TE = 3 * torch.randn(301, config.num_experts)
    bias_E = torch.randn(config.num_experts) if config.choice_bias else None
    together = choose_experts(logits_TE, config, bias_E)
    for step in (1, 2, 7, 32):
        parts = [choose_experts(part, config, bias_E) for part in torch.split(logits_TE, step)]
        assert torch.equal(torch.cat([each.ids_TC for each in parts]), together.ids_TC)
        assert torch.equal(torch.cat([each.weights_TC for each in parts]), together.weights_TC)


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    config = experts(4, 2, scoring="sigmoid", renormalize=False, choice_bias=True)
    logits_TE, bias_E = torch.tensor([[3.0, 2.0, 0.0, -9.0]]), torch.tensor([0, 0, 0, 5.0])
    routes = choose_experts(logits_TE, config, bias_E)
    assert routes.ids_TC.tolist() == [[0, 3]]
    torch.testing.assert_close(routes.weights_TC, torch.sigmoid(torch.tensor([[3.0, -9.0]])))


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """Group 0 has the best expert, and group 1 the two best together."""
    logits_TE = torch.tensor([[0.9, -9.0, 0.6, 0.7, 0.5, -9.0]])
    for score, ids in (("max", [0, 1]), ("two_best", [2, 3])):
        config = experts(6, 2, scoring="sigmoid", groups=3, top_groups=1, group_score=score)
        assert choose_experts(logits_TE, config).ids_TC.tolist() == [ids]


def test_sigmoid_is_as_precise_as_torch_s() -> None:
    x = torch.linspace(-80, 80, 4001)
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x), rtol=1e-6, atol=0)
