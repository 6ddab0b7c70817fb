"""A model that transformers' code computes, with the interface of `models.decoder`.

In: token ids, positions and the step's attention. Out: hidden states, and logits of selected rows.
The T tokens of a step go through the model as one sequence; only attention knows that they belong
to several. The model's forward() calls an inner model, the backbone, and makes logits of its hidden
states. Here both halves run apart, because a step needs the logits of few tokens: the backbone is
called alone, and for logits the whole model with a backbone that returns given hidden states.

Shapes: T tokens of the step, D hidden size, S rows to sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baton_engine.attention.interface import StepAttention
from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.bridge.attention import ATTEND, NAME, StepCalls
from baton_engine.models.bridge.kernels import use_kernels
from baton_engine.models.bridge.products import pack_linears
from baton_engine.models.bridge.source import find_source
from baton_engine.models.bridge.weights import load_module, random_module


class BridgeModel:
    def __init__(self, config: ModelConfig, slots: WeightSlots, module: torch.nn.Module) -> None:
        assert config.bridge is not None
        self.config = config
        self.ops = slots.ops
        self.bits = ""  # transformers' products depend on the batch
        self._calls = StepCalls(config.bridge.layers)
        use_kernels(module, slots)
        pack_linears(module, slots)
        for each in module.modules():
            setattr(each, ATTEND, self._calls.attend)
        self._module: Any = module
        self._device = slots.device
        backbone: Any = module.get_submodule(config.bridge.backbone)
        self._backbone = backbone.forward
        backbone.forward = self._given
        # The type of the backbone's results, which the model expects.
        self._result_type: Any = None
        self._hidden_1SD: torch.Tensor | None = None

    def keep_rope(self, positions: int) -> None:
        """transformers computes rope tables in each step."""

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Compute the hidden states [T, D], and write the tokens' KV."""
        self._calls.begin(attention)
        result = self._backbone(
            input_ids=tokens_T.long()[None], position_ids=positions_T.long()[None], use_cache=False
        )
        self._calls.end()
        self._result_type = type(result)
        hidden_TD: torch.Tensor = result.last_hidden_state[0]
        return hidden_TD

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Logits [S, V], float32 in any compute dtype."""
        self._hidden_1SD = hidden_SD[None]
        tokens_1S = torch.zeros(1, len(hidden_SD), dtype=torch.int64, device=hidden_SD.device)
        logits_SV: torch.Tensor = self._module(input_ids=tokens_1S, use_cache=False).logits[0]
        self._hidden_1SD = None
        return logits_SV.float()

    def answers(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """The hidden states, float32 [S, D]: the backbone has normalised them."""
        return hidden_SD.float()

    @torch.inference_mode()
    def expected(self, tokens: Sequence[int]) -> list[float]:
        """The log-probability of each token after those before it, without that of the first, as
        transformers computes it with its own attention and without a cache."""
        tokens_1T = torch.tensor([tokens], device=self._device)
        self._module.set_attn_implementation("eager")
        try:
            result = self._backbone(input_ids=tokens_1T, use_cache=False)
        finally:
            self._module.set_attn_implementation(NAME)
        self._result_type = type(result)
        scores_TV = self.logits(result.last_hidden_state[0, :-1]).log_softmax(-1)
        found: list[float] = scores_TV.gather(1, tokens_1T[0, 1:, None])[:, 0].tolist()
        return found

    def _given(self, *_: Any, **__: Any) -> Any:
        """In place of the backbone's forward()."""
        return self._result_type(last_hidden_state=self._hidden_1SD)


def load_bridged(config: ModelConfig, slots: WeightSlots, folder: Path | None) -> BridgeModel:
    """The model with the weights of `folder`, or with random ones without it. Raises
    WeightsError."""
    assert config.bridge is not None
    source = find_source(config.architecture, config.bridge.values)
    if folder is None:
        module = random_module(source, slots.dtype, slots.device)
    else:
        module = load_module(source, folder, slots.dtype, slots.device)
    return BridgeModel(config, slots, module)
