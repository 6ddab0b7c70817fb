"""Train a head of EAGLE-3 in plain torch, on hidden states that the target returned.

In: sequences of tokens with the target's hidden states. Out: the tensors of a checkpoint. The head
learns to repeat the target's probabilities of the token after the next, restricted to the head's
vocabulary. As in EAGLE-3 it also learns from its own outputs: in pass j the state of a position is
the head's output of the position before in pass j - 1, and attention sees the target's states only
up to j positions before.

Shapes: B sequences, L pairs of a state and the token after it, D hidden size, C numbers that the
target returns of a token, N query heads, K kv heads, H head_dim, V vocabulary of the head.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
PASSES = 3
# Later passes count less: a draft is of use only if all before it are right.
PASS_WEIGHT = 0.8
BATCH = 8
LEARNING_RATE = 1e-3
WARM_UP = 0.05  # of the time
NO_LABEL = -1


@dataclass(frozen=True)
class Answer:
    """Tokens of one sequence, and what the target returned of each, [L + 1, C]."""

    tokens: Sequence[int]
    hidden_LC: torch.Tensor


@dataclass(frozen=True)
class Target:
    """What the head takes of its target: config.json, embedding and final norm. The head's
    vocabulary are the `ids`."""

    config: dict[str, Any]
    embed_VD: torch.Tensor
    norm_D: torch.Tensor
    ids: torch.Tensor

    @property
    def size(self) -> int:
        return int(self.config["hidden_size"])


def head_config(target: Target) -> dict[str, Any]:
    kept = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim")
    more = ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings")
    values = {key: target.config[key] for key in (*kept, *more)}
    named = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    return {**values, **named, "num_hidden_layers": 1, "draft_vocab_size": len(target.ids)}


def first_tensors(target: Target) -> Tensors:
    """A head that returns the last of the three hidden states."""
    size, inner = target.size, int(target.config["intermediate_size"])
    heads, kv_heads, width = _heads(target)
    noise = torch.Generator().manual_seed(0)

    def random_weight(outputs: int, inputs: int, share: float = 1.0) -> torch.Tensor:
        return share * torch.randn(outputs, inputs, generator=noise) / math.sqrt(inputs)

    last = torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), 1)
    layer = "midlayer"
    return {
        "fc.weight": last,
        f"{layer}.hidden_norm.weight": torch.ones(size),
        f"{layer}.input_layernorm.weight": torch.ones(size),
        f"{layer}.self_attn.q_proj.weight": random_weight(heads * width, 2 * size),
        f"{layer}.self_attn.k_proj.weight": random_weight(kv_heads * width, 2 * size),
        f"{layer}.self_attn.v_proj.weight": random_weight(kv_heads * width, 2 * size),
        f"{layer}.self_attn.o_proj.weight": random_weight(size, heads * width, 0.1),
        f"{layer}.post_attention_layernorm.weight": torch.ones(size),
        f"{layer}.mlp.gate_proj.weight": random_weight(inner, size),
        f"{layer}.mlp.up_proj.weight": random_weight(inner, size),
        f"{layer}.mlp.down_proj.weight": random_weight(size, inner, 0.1),
        "norm.weight": target.norm_D.clone(),
        "lm_head.weight": target.embed_VD[target.ids].clone(),
        "d2t": target.ids - torch.arange(len(target.ids)),
    }


def _heads(target: Target) -> tuple[int, int, int]:
    config = target.config
    heads, size = int(config["num_attention_heads"]), target.size
    return heads, int(config["num_key_value_heads"]), int(config.get("head_dim", size // heads))


class Trainer:
    """`tensors` are trained in place, except for the matrix of the logits."""

    def __init__(self, target: Target, tensors: Tensors) -> None:
        self._target, self._tensors = target, tensors
        fixed = ("lm_head.weight", "d2t")
        self._trained = [each for name, each in tensors.items() if name not in fixed]
        for each in self._trained:
            each.requires_grad_()
        self._eps = float(target.config["rms_norm_eps"])
        theta = float(target.config["rope_parameters"]["rope_theta"])
        width = _heads(target)[2]
        self._turns = theta ** -(torch.arange(0, width, 2) / width)
        self._head_VD = tensors["lm_head.weight"].bfloat16()
        known = torch.full((len(target.embed_VD),), NO_LABEL)
        known[target.ids] = torch.arange(len(target.ids))
        self._label_of = known

    def train(
        self, answers: Sequence[Answer], seconds: float, report: Callable[[str], None]
    ) -> int:
        """Train for `seconds` of CPU time. Returns the number of pairs that were used."""
        optimizer = torch.optim.AdamW(self._trained, betas=(0.9, 0.95), weight_decay=0.01)
        began, shuffled, pairs = time.process_time(), random.Random(0), 0
        order: list[Answer] = []
        losses: list[torch.Tensor] = []
        while (share := (time.process_time() - began) / seconds) < 1:
            if not order:
                order = [*answers]
                shuffled.shuffle(order)
            batch = [order.pop() for _ in range(min(BATCH, len(order)))]
            rate = LEARNING_RATE * min(1.0, share / WARM_UP) * (1 + math.cos(math.pi * share)) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast("cpu", torch.bfloat16):
                loss = self._loss(batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
            optimizer.step()
            pairs += sum(len(each.tokens) - 1 for each in batch)
            losses.append(loss.detach())
            if len(losses) == 20:
                report(f"{share:4.0%}: loss {torch.stack(losses).mean():.3f}")
                losses = []
        return pairs

    def _loss(self, batch: Sequence[Answer]) -> torch.Tensor:
        longest = max(len(each.tokens) for each in batch)
        hidden = torch.zeros(len(batch), longest, batch[0].hidden_LC.shape[1])
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        valid = torch.zeros(len(batch), longest - 1, dtype=torch.bool)
        for row, answer in enumerate(batch):
            count = len(answer.tokens)
            hidden[row, :count] = answer.hidden_LC
            tokens[row, :count] = torch.tensor(answer.tokens)
            valid[row, : count - 1] = True
        size = self._target.size
        with torch.no_grad():
            normed = self._norm(hidden[:, 1:, :size], self._target.norm_D)
            # The share of the target's probability that the head can have does not matter.
            wanted = F.linear(normed.bfloat16(), self._head_VD).float().softmax(-1)
            embedded = self._target.embed_VD[tokens[:, 1:]]
        state = F.linear(hidden[:, :-1, size:], self._tensors["fc.weight"])
        loss = torch.zeros(())
        keys: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(PASSES):
            state = self._layer(embedded, state, keys)
            normed = self._norm(state, self._tensors["norm.weight"])
            scores = F.linear(normed, self._head_VD).float().log_softmax(-1)
            counted = valid.clone()
            counted[:, :number] = False
            each = -(wanted * scores).sum(-1)
            loss = loss + PASS_WEIGHT**number * each[counted].mean()
            state = F.pad(state[:, :-1], (0, 0, 1, 0))
        return loss

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * (wide.pow(2).mean(-1, keepdim=True) + self._eps).rsqrt() * weight

    def _layer(
        self,
        embedded: torch.Tensor,
        state: torch.Tensor,
        keys: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """`keys` has K and V of the passes before, and gets those of this one."""
        weights, name = self._tensors, "midlayer"
        wide = torch.cat(
            (
                self._norm(embedded, weights[f"{name}.input_layernorm.weight"]),
                self._norm(state, weights[f"{name}.hidden_norm.weight"]),
            ),
            -1,
        )
        x = state + self._attention(wide, keys)
        inner = self._norm(x, weights[f"{name}.post_attention_layernorm.weight"])
        gate, up = (
            F.linear(inner, weights[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up")
        )
        return x + F.linear(F.silu(gate) * up, weights[f"{name}.mlp.down_proj.weight"])

    def _attention(
        self, wide: torch.Tensor, keys: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        count, number = wide.shape[1], len(keys)
        heads, kv_heads, width = _heads(self._target)

        def part(name: str, many: int) -> torch.Tensor:
            out = F.linear(wide, self._tensors[f"midlayer.self_attn.{name}_proj.weight"])
            out = out.view(len(wide), count, many, width).transpose(1, 2)
            return out.repeat_interleave(heads // many, 1)

        q_BNLH = self._rotated(part("q", heads)) / math.sqrt(width)
        keys.append((self._rotated(part("k", kv_heads)), part("v", kv_heads)))
        k_BNLH, v_BNLH = keys[0]
        places = torch.arange(count)
        hidden_LL = places[None] > places[:, None] - number
        scores = [(q_BNLH @ k_BNLH.transpose(2, 3)).masked_fill(hidden_LL, -1e9)]
        values = []
        for later, (k_other, v_other) in enumerate(keys[1:], start=1):
            # Pass `later` computed the position this many before.
            back = number - later
            k_there, v_there = (
                F.pad(each[:, :, : count - back], (0, 0, back, 0)) for each in (k_other, v_other)
            )
            scores.append((q_BNLH * k_there).sum(-1, keepdim=True))
            values.append(v_there)
        shares = torch.cat(scores, -1).float().softmax(-1)
        out = shares[..., :count].to(v_BNLH.dtype) @ v_BNLH
        for later, v_there in enumerate(values):
            out = out + shares[..., count + later, None].to(v_there.dtype) * v_there
        return F.linear(
            out.transpose(1, 2).flatten(2), self._tensors["midlayer.self_attn.o_proj.weight"]
        )

    def _rotated(self, x_BNLH: torch.Tensor) -> torch.Tensor:
        angles = (torch.arange(x_BNLH.shape[2])[:, None] * self._turns).repeat(1, 2)
        low, high = x_BNLH.chunk(2, -1)
        rotated = torch.cat((-high, low), -1)
        return x_BNLH * angles.cos().to(x_BNLH.dtype) + rotated * angles.sin().to(x_BNLH.dtype)
