"""Norms and gated MLPs of a module with Baton's kernels, which take one pass where torch takes
several.

In: a module of transformers with its weights. Out: the same module; parts of it compute the same
function with other operations. transformers has a hundred classes of norms and MLPs under as many
names. So a part is not known by its class: a copy of it in float32 is run with some rows, and the
part is changed only if the kernels give the same numbers.

Shapes: T tokens of the step, R rows of a test, D size of a norm or of an MLP's input, F outputs of
gate and up together.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from baton_engine.layers.ops import Ops
from baton_engine.layers.parameter import WeightSlots

Rows = Callable[[torch.Tensor], torch.Tensor]

# The attributes in which norms have their eps.
EPS = ("variance_epsilon", "eps")
# The linear layers of a gated MLP.
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
# Sizes of the MLP that is tested in place of one with the model's sizes.
TEST_SIZE, TEST_MLP_SIZE = 32, 48
# The rows of a test have about these sizes. A clamped gate changes the last, and the eps of a norm,
# usually 1e-5 or 1e-6, the first.
TEST_SCALES = (1e-3, 1.0, 16.0)
# How far float32 numbers may be from each other, relative to the largest: additions have another
# order. Another function is further off by orders of magnitude.
TOLERANCE = 1e-5


def use_kernels(module: torch.nn.Module, slots: WeightSlots) -> None:
    """To be called before linear layers are packed: it stacks some of them."""
    # Names, because a list of the modules would keep the weights. Linear layers are parts of MLPs.
    for name in [
        name for name, part in module.named_modules() if not isinstance(part, torch.nn.Linear)
    ]:
        part = module.get_submodule(name)
        if len(inspect.signature(part.forward).parameters) != 1:
            continue
        forward = _norm(part, slots.ops) or _gated_mlp(name, part, slots)
        if forward is not None:
            part.forward = forward  # the module's own, before that of its class


def _norm(part: torch.nn.Module, ops: Ops) -> Rows | None:
    """What computes an RMSNorm; None for another module."""
    eps = next((value for key in EPS if isinstance(value := getattr(part, key, None), float)), None)
    tensors = [*part.named_parameters(), *part.named_buffers()]
    if eps is None or [name for name, _ in tensors] != ["weight"] or tensors[0][1].dim() != 1:
        return None
    weight_D = tensors[0][1].detach()
    size = len(weight_D)

    def normed(weight_D: torch.Tensor) -> Rows:
        def forward(x: torch.Tensor) -> torch.Tensor:
            rows_TD = x.reshape(-1, size)
            return ops.add_norm(rows_TD, None, weight_D, eps).view(x.shape)

        return forward

    theirs = copy.deepcopy(part).float().forward
    x_RD = _test_rows(size, weight_D.device)
    for offset in (0.0, 1.0):  # some weights are kept as the difference to 1
        wide_D = weight_D.float() + offset
        if _same(theirs, normed(wide_D), x_RD):
            return normed(wide_D)
    return None


def _gated_mlp(name: str, part: Any, slots: WeightSlots) -> Rows | None:
    """What computes an MLP whose gate is silu, with gate and up as one product; None for another
    module."""
    layers = dict(part.named_children())
    if not layers.keys() >= {GATE, UP, DOWN}:
        return None
    gate, up, down = (layers[key] for key in (GATE, UP, DOWN))
    if any(type(layer) is not torch.nn.Linear for layer in (gate, up, down)):
        return None
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return None

    if not _is_gated_mlp(part, gate.weight.device, slots.ops):
        return None
    weight_FD = torch.cat([gate.weight.detach(), up.weight.detach()])
    bias_F = None if gate.bias is None else torch.cat([gate.bias.detach(), up.bias.detach()])
    size = gate.in_features
    delattr(part, GATE)
    delattr(part, UP)
    product = slots.product(f"{name}.{GATE}", weight_FD, bias_F)

    def forward(x: torch.Tensor) -> torch.Tensor:
        gated_TF = slots.ops.silu_mul(product(x.reshape(-1, size)))
        # Looked up in each call, because the layer is packed later.
        out: torch.Tensor = part.down_proj(gated_TF.view(*x.shape[:-1], -1))
        return out

    return forward


def _is_gated_mlp(part: torch.nn.Module, device: torch.device, ops: Ops) -> bool:
    """Whether the module computes down(silu(gate(x)) * up(x)) with linear layers of other sizes."""
    gate, up = (torch.nn.Linear(TEST_SIZE, TEST_MLP_SIZE, device=device) for _ in range(2))
    down = torch.nn.Linear(TEST_MLP_SIZE, TEST_SIZE, device=device)
    tested = copy.copy(part)
    tested._modules = {**part._modules, GATE: gate, UP: up, DOWN: down}

    def ours(x_RD: torch.Tensor) -> torch.Tensor:
        out_RD: torch.Tensor = down(ops.silu_mul(torch.cat([gate(x_RD), up(x_RD)], -1)))
        return out_RD

    return _same(tested.forward, ours, _test_rows(TEST_SIZE, device))


def _test_rows(size: int, device: torch.device) -> torch.Tensor:
    """Random rows [R, size] whose mean is not 0."""
    noise = torch.Generator().manual_seed(0)
    x_RD = torch.randn(len(TEST_SCALES), size, generator=noise) + 0.5
    return (x_RD * torch.tensor(TEST_SCALES)[:, None]).to(device)


@torch.inference_mode()
def _same(theirs: Rows, ours: Rows, x_RD: torch.Tensor) -> bool:
    """Whether both compute the same float32 numbers."""
    try:
        expected = theirs(x_RD.clone())
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False  # it takes something other than rows
    found = ours(x_RD.clone())
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape:
        return False
    allowed_R1 = TOLERANCE * expected.abs().amax(-1, keepdim=True)
    return bool(((expected.float() - found).abs() <= allowed_R1).all())
