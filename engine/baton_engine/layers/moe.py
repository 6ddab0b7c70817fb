"""The MLP of a layer with a mixture of experts.

Each expert has tensors of its own in most checkpoints. They fill parts of two tensors, which the
products of experts take.

Shapes: T tokens of the step, D hidden size, E experts, F inner size of an expert, G = 2 F.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.quantization.scheme import WeightScheme
from baton_engine.errors import WeightsError
from baton_engine.layers.decoder_layers import GatedMLP, Linear
from baton_engine.layers.expert_routes import choose_experts, sigmoid
from baton_engine.layers.experts import Experts, ExpertWeights, LoadedExperts, QuantizedExperts
from baton_engine.layers.linear_weights import LinearWeights
from baton_engine.layers.parameter import Parameter, WeightSlots
from baton_engine.layers.quantization.online import SplitParameter
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, stacked
from baton_engine.layers.quantization.weight_format import format_of


class MoE:
    """The sum of the outputs of each token's experts and, if there is one, of the shared MLP.

    Families whose checkpoints have other names override those of the router, of an expert's gate,
    up and down, of the shared MLP, and of the module (`rename`).
    """

    router_name = "gate"
    expert_parts = ("gate_proj", "up_proj", "down_proj")
    shared_name = "shared_expert"

    def __init__(
        self, slots: WeightSlots, name: str, config: ModelConfig, experts: ExpertsConfig
    ) -> None:
        here = self.rename(name)
        hidden, count = config.hidden_size, experts.num_experts
        self._experts, self._ops = experts, slots.ops
        self._router_dtype = torch.float32 if experts.float32_router else slots.dtype
        router, bias = f"{here}.{self.router_name}", experts.bias
        self._router = Linear(slots, [router], [count], hidden, bias, dtype=self._router_dtype)
        self._bias_E: torch.Tensor | None = None
        if experts.choice_bias:
            choice_bias = f"{router}.e_score_correction_bias"
            self._bias_E = slots.tensor(choice_bias, count, dtype=torch.float32)
        self._declare_experts(slots, name, here, hidden, experts)
        self._shared: GatedMLP | None = None
        self._shared_gate: Linear | None = None
        if experts.shared_size:
            shared = f"{here}.{self.shared_name}"
            self._shared = GatedMLP(slots, shared, config, experts.shared_size)
            if experts.shared_gate:
                self._shared_gate = Linear(slots, [f"{shared}_gate"], [1], hidden, False)

    def _declare_experts(
        self, slots: WeightSlots, name: str, here: str, hidden: int, experts: ExpertsConfig
    ) -> None:
        scheme = slots.scheme_of(f"{here}.experts.0.{self.expert_parts[0]}")
        if scheme is not None:
            quantized = self._quantized_experts(slots, name, here, hidden, experts, scheme)
            slots.when_filled(lambda: self._pack(quantized()))
            return
        weights = self.make_experts(slots, name, here, hidden, experts)
        slots.when_filled(lambda: self._pack(weights))

    def _pack(self, weights: LoadedExperts) -> None:
        self._weights: Experts = self._ops.pack_experts(weights)

    def _quantized_experts(
        self,
        slots: WeightSlots,
        name: str,
        here: str,
        hidden: int,
        experts: ExpertsConfig,
        scheme: WeightScheme,
    ) -> Callable[[], LoadedExperts]:
        """Experts of which each has quantized tensors of its own."""
        gate, up, down = self.expert_parts
        each = [f"{here}.experts.{expert}" for expert in range(experts.num_experts)]
        sizes = [experts.size] * 2
        gate_ups = [
            LinearWeights(slots, [f"{expert}.{gate}", f"{expert}.{up}"], sizes, hidden)
            for expert in each
        ]
        downs = [
            LinearWeights(slots, [f"{expert}.{down}"], [hidden], experts.size) for expert in each
        ]
        if format_of(scheme).plain_tensors:
            gate_up_names, down_names = self._plain_names(each)
            gate_up_parts, down_parts = (
                [slots.parameters[weight] for weight in names]
                for names in (gate_up_names, down_names)
            )
            count, size = experts.num_experts, experts.size
            self._also_fused(
                *(slots, name, here, [*gate_up_names, *down_names]),
                SplitParameter.of(gate_up_parts, (count, 2 * size, hidden)),
                SplitParameter.of(down_parts, (count, hidden, size)),
            )
        return lambda: QuantizedExperts(_stacked(here, gate_ups), _stacked(here, downs))

    def _plain_names(self, each: Sequence[str]) -> tuple[list[str], list[str]]:
        """The plain tensors of experts with the names `each`: those of gate and up, and of down."""
        gate, up, down = self.expert_parts
        gate_ups = [f"{expert}.{part}.weight" for expert in each for part in (gate, up)]
        return gate_ups, [f"{expert}.{down}.weight" for expert in each]

    def rename(self, name: str) -> str:
        """The module's name in checkpoints, if it is not `name`."""
        return name

    def make_experts(
        self, slots: WeightSlots, name: str, here: str, hidden: int, experts: ExpertsConfig
    ) -> ExpertWeights:
        count, size = experts.num_experts, experts.size
        gate_ups, downs = self._plain_names([f"{here}.experts.{each}" for each in range(count)])
        gate_up_EGD = slots.stacked(gate_ups, [size] * len(gate_ups), hidden)
        down_EDF = slots.stacked(downs, [hidden] * count, size)
        gate_up_EGD = gate_up_EGD.view(count, 2 * size, hidden)
        down_EDF = down_EDF.view(count, hidden, size)
        fused = Parameter(gate_up_EGD), Parameter(down_EDF)
        self._also_fused(slots, name, here, [*gate_ups, *downs], *fused)
        return ExpertWeights(gate_up_EGD, down_EDF)

    def _also_fused(
        self,
        slots: WeightSlots,
        name: str,
        here: str,
        names: Sequence[str],
        gate_up: Parameter,
        down: Parameter,
    ) -> None:
        """transformers may save all experts as two tensors, with its own name of the module."""
        fused = {f"{name}.experts.gate_up_proj": gate_up, f"{name}.experts.down_proj": down}
        if here != name:
            router = f"{here}.gate.weight"
            names = [*names, router]
            fused[f"{name}.gate.weight"] = slots.parameters[router]
        slots.also_spelled(names, fused)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        logits_TE = self._router(x_TD.to(self._router_dtype)).float()
        routes = choose_experts(logits_TE, self._experts, self._bias_E)
        out_TD = self._ops.experts(x_TD, routes, self._weights)
        if self._shared is None:
            return out_TD
        shared_TD = self._shared(x_TD)
        if self._shared_gate is not None:
            shared_TD = shared_TD.mul_(sigmoid(self._shared_gate(x_TD)))
        return out_TD.add_(shared_TD)


def _stacked(name: str, experts: Sequence[LinearWeights]) -> QuantizedWeight:
    """Raises WeightsError unless all experts of the layer `name` are quantized in the same way."""
    weights = [weight for each in experts for weight in each.take()]
    quantized = [each for each in weights if isinstance(each, QuantizedWeight)]
    one = stacked(quantized) if len(quantized) == len(experts) else None
    if one is None:
        raise WeightsError(
            f"{name}.experts are not all quantized in the same way: one kind of numbers, one size "
            "of groups and one order of inputs (desc_act false) are supported"
        )
    return one
