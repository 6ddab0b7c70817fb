"""Finds where in a model two computations of the same tokens begin to differ.

In: engines, before they compute anything. Out: their hidden states, and from two of them the first
part of the first layer whose numbers differ in bits.

Each callable part of a decoder is wrapped: the layers' attention, MLP, norms and products, and the
logits. Parts come in the order of computation, so all that the first differing part read was equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton_engine.core.engine_core import EngineCore

# Hidden states of one token in one context are that close to each other, in relation to their norm,
# if only rounding differs. Those of the same token in other contexts are not.
NEAR = 0.05


@dataclass
class Forward:
    """One step: its tokens, their positions, and the numbers of each part by name, [T, ...]."""

    ids: list[int]
    positions: list[int]
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    # Places of the tokens whose logits exist.
    sampled: list[int] = field(default_factory=list)

    def rows(self, part: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The numbers of each token for which the part was computed, with the token's place."""
        places = self.sampled if part == "logits" else range(len(self.ids))
        return zip(places, self.parts[part], strict=True)


@dataclass
class Origin:
    """Records the steps of one engine."""

    forwards: list[Forward] = field(default_factory=list)

    @classmethod
    def of(cls, engine: EngineCore) -> Origin:
        origin, model = cls(), engine.runner._model  # type: ignore[attr-defined]
        forward, logits = model.forward, model.logits

        def recorded_forward(tokens_T: torch.Tensor, positions_T: torch.Tensor, *rest: Any) -> Any:
            origin.forwards.append(Forward(tokens_T.tolist(), positions_T.tolist()))
            hidden_TD = forward(tokens_T, positions_T, *rest)
            origin._keep("hidden states", hidden_TD)
            return hidden_TD

        def recorded_logits(hidden_SD: torch.Tensor) -> torch.Tensor:
            last = origin.forwards[-1]
            known = [row.tolist() for row in last.parts["hidden states"]]
            result: torch.Tensor = logits(hidden_SD)
            # Equal hidden states have equal logits, so any of their tokens will do.
            last.sampled += [known.index(row.tolist()) for row in hidden_SD]
            origin._keep("logits", result)
            return result

        model.forward, model.logits = recorded_forward, recorded_logits
        for number, layer in enumerate(model._layers):
            origin._wrap_parts(layer, f"layer {number}", depth=2)
        return origin

    def _wrap_parts(self, owner: Any, name: str, depth: int) -> None:
        for attribute, part in list(vars(owner).items()):
            if callable(part) and type(part).__module__.startswith("baton_engine"):
                label = f"{name} {attribute.strip('_')}"
                if depth > 1:
                    self._wrap_parts(part, label, depth - 1)
                setattr(owner, attribute, self._recorded(part, label))

    def _recorded(self, part: Callable[..., torch.Tensor], name: str) -> Callable[..., Any]:
        def recorded(x_TD: torch.Tensor, *rest: Any) -> torch.Tensor:
            self._keep(f"{name}, input", x_TD)
            result = part(x_TD, *rest)
            self._keep(name, result)
            return result

        return recorded

    def _keep(self, name: str, numbers: torch.Tensor) -> None:
        parts = self.forwards[-1].parts
        kept = numbers.detach().clone().float()
        parts[name] = torch.cat([parts[name], kept]) if name in parts else kept


def first_difference(alone: Origin, others: Iterable[Origin], known: Sequence[int]) -> str:
    """Describe the first part whose numbers differ for a token of `known`, the ids of a sequence
    that `alone` computed."""
    expected: dict[int, dict[str, torch.Tensor]] = {}
    for forward in alone.forwards:
        for part in forward.parts:
            for place, numbers in forward.rows(part):
                expected.setdefault(forward.positions[place], {})[part] = numbers
    found = [
        difference
        for other in others
        for forward in other.forwards
        for difference in _differences(forward, expected, known)
    ]
    if not found:
        return "no hidden state and no logit differs: the difference begins in sampling"
    order = list(dict.fromkeys(part for parts in expected.values() for part in parts))
    part, position, text = min(found, key=lambda each: (order.index(each[0]), each[1]))
    return f"the first difference is in {part}, for the token at position {position}: {text}"


def _differences(
    forward: Forward, expected: dict[int, dict[str, torch.Tensor]], known: Sequence[int]
) -> Iterator[tuple[str, int, str]]:
    """Each (part, position, description) of the step whose bits are not the expected ones."""
    hidden = forward.parts["hidden states"]
    ours = {}
    for place, (id, position) in enumerate(zip(forward.ids, forward.positions, strict=True)):
        if position < len(known) and known[position] == id and position in expected:
            right = expected[position]["hidden states"]
            if torch.dist(hidden[place], right) <= NEAR * right.norm():
                ours[place] = position
    for part in forward.parts:
        for place, numbers in forward.rows(part):
            if place not in ours or part not in expected[ours[place]]:
                continue
            right = expected[ours[place]][part]
            differing = numbers != right
            if differing.any():
                gap = (numbers - right).abs().max().item()
                text = (
                    f"{int(differing.sum())} of {differing.numel()} numbers, by up to {gap:.2g}, "
                    f"in a step of {len(forward.ids)} tokens"
                )
                yield part, ours[place], text
