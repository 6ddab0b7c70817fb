"""Learn how a model of transformers attends, by running it once without memory.

In: a Source. Out: per call of attention its heads, scale, window and soft cap; the number of
weights. The model is built on torch's meta device, whose tensors have shapes and no numbers: this
takes a second and no memory, for a model of any size. A model that attends in another way than
over the tokens before it is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from baton_engine.config.model_config import AttentionSpec
from baton_engine.models.bridge.attention import ATTEND, SINKS, attend
from baton_engine.models.bridge.source import Source, refused

# The name of the attention that learns; see attention.NAME. Only this one has a mask function.
NAME = "baton-learning"
TOKENS = 5
# Positions at which masks are looked at: more than any window, and few enough to list.
MOST_POSITIONS = 1 << 17
# The attribute of a mask with the number of its window.
WINDOW = "baton_window"
# Options of attention that do not change it, or that are read here.
KNOWN_TENSORS = frozenset({"attention_mask", "position_ids", "cache_position", SINKS})
# Options that change attention in a way that no kernel of ours has.
UNSUPPORTED = {
    "position_bias": "adds a bias to scores",
    "sinks": "has attention sinks per token",
    "indices": "attends to chosen tokens alone",
    "block_indices": "attends to chosen tokens alone",
}


@dataclass(frozen=True, slots=True)
class Learned:
    """`layers` has one entry per call of attention. `backbone` is the module that computes hidden
    states, and `widest` the largest number of outputs of a product in it."""

    layers: tuple[AttentionSpec, ...]
    backbone: str
    weights: int
    widest: int
    hidden_size: int
    vocab_size: int


def learn(source: Source) -> Learned:
    """Raises UnsupportedModel."""
    module = _on_meta(source)
    calls = _LearningCalls()
    for each in module.modules():
        setattr(each, ATTEND, calls.attend)
    watched = _Watched(module, calls)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), watched:
            logits = module(
                input_ids=tokens,
                # With it, models do not ask whether positions are those of several sequences.
                attention_mask=torch.ones_like(tokens),
                position_ids=torch.arange(TOKENS, device="meta")[None],
                use_cache=False,
            ).logits
    except _Refused as error:
        raise refused(source.architecture, str(error)) from error
    except Exception as error:
        why = f"one step without memory fails: {' '.join(str(error).split())}"
        raise refused(source.architecture, why) from error
    if not calls.layers:
        raise refused(
            source.architecture, "its attention does not go through transformers' interface"
        )
    hidden = getattr(watched.output, "last_hidden_state", None)
    if watched.calls_inside != len(calls.layers) or hidden is None:
        raise refused(source.architecture, "its layers are not those of one inner model")
    return Learned(
        layers=tuple(_cached(layer, source.max_positions) for layer in calls.layers),
        backbone=watched.name,
        weights=sum(parameter.numel() for parameter in module.parameters()),
        widest=_widest(module, watched.name, source),
        hidden_size=hidden.shape[-1],
        vocab_size=logits.shape[-1],
    )


def _on_meta(source: Source) -> torch.nn.Module:
    make: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            # Grouped products of experts exist in bfloat16 alone.
            module: torch.nn.Module = make(
                source.config, attn_implementation=NAME, dtype=torch.bfloat16
            )
    except KeyError as error:
        if error.args != (NAME,):
            raise refused(source.architecture, f"config.json: {error!r}") from error
        why = "its attention does not go through transformers' interface"
        raise refused(source.architecture, why) from error
    except Exception as error:
        why = f"it cannot be built: {' '.join(str(error).split())}"
        raise refused(source.architecture, why) from error
    return module.eval()


class _Refused(Exception):
    """Why a call of attention cannot be served."""


class _LearningCalls:
    def __init__(self) -> None:
        self.layers: list[AttentionSpec] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        _check_options(module, options)
        if not query.shape[2] == key.shape[2] == TOKENS:
            raise _Refused("it attends to other tokens than those of the sequence")
        scale = options.get("scaling")
        self.layers.append(
            AttentionSpec(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=max(query.shape[-1], value.shape[-1]),
                scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
                window=_window_of(options),
                soft_cap=options.get("softcap"),
                sinks=_has_sinks(options, query.shape[1]),
            )
        )
        return query.new_empty(1, TOKENS, query.shape[1], value.shape[-1])


def _check_options(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    for name, what in UNSUPPORTED.items():
        if options.get(name) is not None:
            raise _Refused(f"it {what} ({name})")
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and name not in KNOWN_TENSORS:
            raise _Refused(f"it passes {name} to attention, which Baton does not know")
    asked = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if asked is None else asked
    if causal is False and options["attention_mask"] is None:
        raise _Refused("it attends to later tokens, too")


def _has_sinks(options: Mapping[str, Any], heads: int) -> bool:
    sinks_N = options.get(SINKS)
    if sinks_N is None:
        return False
    if tuple(sinks_N.shape) != (heads,):
        raise _Refused(f"its attention sinks are not one number per head ({SINKS})")
    return True


def _window_of(options: Mapping[str, Any]) -> int | None:
    mask = options["attention_mask"]
    if mask is None:
        window: int | None = options.get("sliding_window")
        return window
    whole = mask if mask._base is None else mask._base  # a view may have all its rows
    if not hasattr(whole, WINDOW) or whole.shape != mask.shape:
        raise _Refused("it has a mask of its own")
    kept: int | None = getattr(whole, WINDOW)
    return kept


def _mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
) -> torch.Tensor:
    """The mask function of the attention that learns: a tensor without numbers that knows its
    window."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    setattr(mask, WINDOW, window_of(mask_function))
    return mask


def window_of(mask_function: Callable[..., Any], positions: int = MOST_POSITIONS) -> int | None:
    """The window (see ModelConfig.windows) of a function that says whether a query sees a key;
    None if a query sees all keys up to its own."""
    zero, keys = torch.tensor(0), torch.arange(positions)
    rows = {}
    for query in (0, 1, positions // 2, positions - 1):
        try:
            seen = mask_function(zero, zero, torch.tensor(query), keys)
        except (RuntimeError, NotImplementedError, IndexError) as error:
            raise _Refused("its mask depends on more than positions") from error
        rows[query] = torch.as_tensor(seen).expand(positions)
    window = int(rows[positions - 1].sum())
    for query, seen in rows.items():
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(seen, expected):
            raise _Refused("its mask is neither causal nor a sliding window")
    return None if window == positions else window


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _mask)


class _Watched:
    """Notes the first module that the model's own forward() calls, as a context."""

    def __init__(self, module: torch.nn.Module, calls: _LearningCalls) -> None:
        self._calls, self._depth = calls, 0
        self._names = {id(each): name for name, each in module.named_modules()}
        self.name, self.output, self.calls_inside = "", None, 0

    def __enter__(self) -> None:
        # Hooks of all modules, which only this thread's call runs through.
        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave),
        ]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._depth == 1 and not self.name:
            self.name = self._names[id(module)]
        self._depth += 1

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 1 and self._names[id(module)] == self.name:
            self.output = output
            self.calls_inside = len(self._calls.layers)


def _cached(layer: AttentionSpec, longest: int) -> AttentionSpec:
    """The layer with a head size that caches can have, an even number, and without a window that
    hides no key of a sequence of `longest` tokens."""
    window = layer.window if layer.window and layer.window < longest else None
    return replace(layer, head_dim=layer.head_dim + layer.head_dim % 2, value_dim=0, window=window)


def _widest(module: torch.nn.Module, backbone: str, source: Source) -> int:
    """Numbers that a token takes in the widest MLP, for the memory estimate."""
    inner = module.get_submodule(backbone)
    widths = [parameter.shape[-2:] for parameter in inner.parameters() if 2 <= parameter.dim() <= 3]
    vocab = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    widest = max(max(shape) for shape in widths if vocab not in shape)
    chosen = getattr(source.text, "num_experts_per_tok", None)
    return widest * (chosen if isinstance(chosen, int) else 1)
