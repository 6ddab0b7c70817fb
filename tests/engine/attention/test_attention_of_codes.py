"""A pool of 8-bit codes gives the bits of a pool that holds the same rounded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from baton_engine.attention.exact.backend import TorchAttention, TorchStep
from baton_engine.attention.exact.pages import SIZES, Sizes
from baton_engine.config.model_config import AttentionSpec
from baton_engine.interface import Row
from baton_engine.kv.eight_bits import rounded
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_engine.layers.ops import TORCH_OPS
from baton_protocol.ids import BlockId
from baton_protocol.layout import CODES, LATENT, KVField, KVLayout, in_codes, keys_and_values
from tests.support.engines.attention_specs import batch_of

BLOCK, BLOCKS = 16, 20


@dataclass(frozen=True)
class Shape:
    """Query and kv heads, numbers of a head of k and of v, and of those that a kernel rotates and
    stores; 0 if torch does."""

    queries: int
    kv: int
    dim: int
    value_dim: int = 0
    rotated: int = 0
    window: int | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.queries,
            num_kv_heads=self.kv,
            head_dim=self.dim,
            scale=self.dim**-0.5,
            window=self.window,
            value_dim=self.value_dim,
            latent=self.value_dim > 0,
        )

    def memory(self, dtype: str, code: str | None) -> TorchMemory:
        """A pool whose memory is NaN, but for the padding."""
        fields: Sequence[KVField] = keys_and_values(self.kv, self.dim, dtype)
        if self.value_dim:
            fields = (KVField(LATENT, 1, self.dim, dtype),)
        if code is not None:
            fields = in_codes(fields, code)
        layout = KVLayout.of_fields(tuple(fields), num_layers=1, block_size=BLOCK, chunk_blocks=1)
        memory = TorchMemory(layout, BLOCKS, torch.device("cpu"))
        memory.pool[1:] = 0x7F  # as an exponent, that of NaN
        if code is None:
            for field in memory.fields.values():
                field[1:] = torch.nan
        return memory


# Kernels read the first three in place. The sizes of the others are no whole vectors.
SHAPES = {
    "a window": Shape(4, 2, 32, rotated=32, window=20),
    "more query heads than are computed together": Shape(6, 1, 64, rotated=32),
    "latent rows": Shape(6, 1, 96, 64),
    "odd sizes": Shape(4, 2, 24),
    "latent rows, odd sizes": Shape(4, 1, 40, 24),
}
# Prompts, of which the last shares blocks with another, and then later tokens of each.
PROMPTS = ((0, 100, 1), (0, 60, 8), (0, 45, 12), (48, 5, 15))
LATER = ((100, 9, 1), (60, 1, 8), (45, 1, 12), (53, 1, 15))


def rows_of(spans: Sequence[tuple[int, int, int]]) -> list[Row]:
    """A row of each (start, count, first block)."""
    rows = []
    for start, count, first in spans:
        blocks = [BlockId(first + number) for number in range(-(-(start + count) // BLOCK))]
        if first == 15:
            blocks[:3] = [BlockId(8), BlockId(9), BlockId(10)]
        rows.append(Row((0,) * count, start, blocks))
    return rows


def outputs(
    shape: Shape, memory: TorchMemory, dtype: torch.dtype, sizes: Sizes, code: torch.dtype | None
) -> torch.Tensor:
    """The outputs of two steps. With `code`, K and V are rounded after they are stored."""
    attention = TorchAttention(memory, [shape.spec], sizes, dtype=dtype)
    noise = torch.Generator().manual_seed(0)
    found = []
    for rows in (rows_of(PROMPTS), rows_of(LATER)):
        tokens = sum(len(row.tokens) for row in rows)
        step = attention.begin(batch_of(rows, memory.layout))
        heads = shape.queries + (1 if shape.value_dim else 2) * shape.kv
        x = torch.randn(tokens, heads, shape.dim, generator=noise)
        x = (x * torch.randn(tokens, heads, 1, generator=noise).exp2()).to(dtype)
        angles = torch.randn(tokens, 1, max(shape.rotated // 2, 1), generator=noise)
        rope = angles.cos().to(dtype), angles.sin().to(dtype)
        watched = step if code is None else Rounding(step, code)
        if shape.rotated:
            found.append(TORCH_OPS.attend(x, shape.queries, None, rope, 0, watched))
            continue
        both = shape.queries + shape.kv
        v = None if shape.value_dim else x[:, both:]
        found.append(watched.attend(0, x[:, : shape.queries], x[:, shape.queries : both], v))
    return torch.cat(found)


class Rounding:
    """A step of a pool of numbers that rounds K and V."""

    def __init__(self, step: TorchStep, code: torch.dtype) -> None:
        self._step, self._code, self.slots = step, code, step.slots

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKV: torch.Tensor | None,
        *,
        stored: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k, v = rounded(k_TKH, self._code), None if v_TKV is None else rounded(v_TKV, self._code)
        return self._step.attend(layer, q_TNH, k, v, sinks_N=sinks_N)


TOGETHER, APART = SIZES, Sizes(max_copied=1, max_pairs=0, few_tokens=0)
CASES = list(product(SHAPES, (TOGETHER, APART), ("float32", "bfloat16"), CODES))
QUICK = (
    ("a window", TOGETHER, "bfloat16", "int8"),
    ("odd sizes", APART, "float32", "float8_e4m3fn"),
    ("latent rows, odd sizes", APART, "bfloat16", "int8"),
)


@pytest.mark.parametrize(
    ("name", "sizes", "dtype", "code"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.long]) for case in CASES],
)
def test_codes_give_the_bits_of_rounded_numbers(
    name: str, sizes: Sizes, dtype: str, code: str
) -> None:
    shape, kept = SHAPES[name], TORCH_DTYPES[dtype]
    codes, numbers = shape.memory(dtype, code), shape.memory(dtype, None)
    actual = outputs(shape, codes, kept, sizes, None)
    assert not actual.isnan().any()
    assert torch.equal(actual, outputs(shape, numbers, kept, sizes, TORCH_DTYPES[code]))
