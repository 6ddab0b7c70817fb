"""The table of kernels that `make gpu` measures. A later kernel is a row of ROWS.

A row makes a `Trial` on fresh random data: a call of the kernel, through the function that the
engine calls; what it must give, by its torch twin or by definition; and the least bytes and
operations that it takes. Sizes are those of models; in a dry run they are tiny.

Shapes: T tokens, D hidden size, F MLP size, N query heads, K kv heads, Z = N + 2 K, H head_dim,
S samples, V vocabulary or numbers of a head of v, E experts, C experts of a token, O and I a
linear's output and input size, B block size, J keys of a row, M blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from baton_engine.attention.interface import KVSlots
from baton_engine.attention.layer_kv import LayerKV, layers_kv
from baton_engine.attention.triton_backend import TritonAttention
from baton_engine.attention.triton_store_kv import store_kv
from baton_engine.build import ops_for
from baton_engine.config.families import read_config
from baton_engine.config.model_config import AttentionSpec, RopeConfig
from baton_engine.interface import Row, Sample
from baton_engine.kv.eight_bits import decoded, encoded
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers.experts import ClampedSwiGLU, ExpertWeights, Routes, experts_twin
from baton_engine.layers.ops import TORCH_OPS
from baton_engine.layers.rotary import HeadNorm, Rope
from baton_engine.layers.triton_matmul import FIXED_TILE
from baton_engine.sampling.metadata import draws_of
from baton_protocol.ids import BlockId
from baton_protocol.layout import CODES, EXPONENTS, LATENT, KVField, KVLayout
from baton_protocol.sampling import SamplingParams
from benchmarks.gpu.processes import ROOT
from tests.support.engines.attention_specs import batch_of
from tests.support.engines.small_pool import kv_of, slots_in

BLOCK, LAYERS, LAYER = 16, 2, 1
EPS = 1e-6
SPARE_BLOCKS = 8  # of the pool, full of NaN
# A pool whose numbers need offsets of more than 32 bits, signed or not.
WIDE_POOL = (1 << 32) + (1 << 20)
# In a dry run no number of tokens, keys or samples is larger than these.
DRY_TOKENS, DRY_KEYS, DRY_OUTPUTS = 5, 70, 96
# Kernels compute in float32 and round once; attention also rounds its weights.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
EQUAL = 0.0

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`run` launches the kernel, and may be called again. Its results are what it returns, or what
    `read` finds afterwards. They may differ from `expected` by `tolerance`, relative to the value
    or to the root mean square of all values. `expected` is computed in float32. `twin` is
    torch's form of the kernel, if there is one to compare times with; with `twin_waits` it waits
    for the device."""

    run: Callable[[], Tensors]
    expected: Tensors
    tolerance: float
    bytes: int
    operations: int = 0
    read: Callable[[], Tensors] | None = None
    twin: Callable[[], object] | None = None
    twin_waits: bool = False

    def results(self) -> Tensors:
        returned = self.run()
        return returned if self.read is None else self.read()


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and how a row's data are made. Every number of tokens, keys or outputs goes through
    `at_most`."""

    device: torch.device
    dry: bool

    @property
    def dtype(self) -> torch.dtype:
        """Triton's interpreter computes bfloat16 wrongly."""
        return torch.float32 if self.dry else torch.bfloat16

    def at_most(self, number: int, limit: int = DRY_TOKENS) -> int:
        return min(number, limit) if self.dry else number

    def sizes(self, model: str) -> Sizes:
        return DRY_SIZES if self.dry else SIZES[model]()

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class KernelRow:
    name: str
    make: Callable[[Setup], Trial]


def _of_shape(folder: str) -> Sizes:
    config = read_config(ROOT / "benchmarks" / "shapes" / folder)
    return Sizes(
        *(config.hidden_size, config.intermediate_size, config.num_heads),
        *(config.num_kv_heads, config.head_dim, config.vocab_size),
    )


SIZES: Mapping[str, Callable[[], Sizes]] = {
    "Qwen3-0.6B": partial(_of_shape, "qwen3-0.6b"),
    "Qwen3-8B": partial(_of_shape, "qwen3-8b"),
    "Gemma-2-2B": lambda: Sizes(2304, 9216, 8, 4, 256, 256_000),
    "gpt-oss-20b": lambda: Sizes(2880, 2880, 64, 8, 64, 201_088),
}


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent rows: query heads, numbers of a row, and those of them that are v."""

    heads: int
    dim: int = 576
    value_dim: int = 512


LATENTS: Mapping[str, Latent] = {"DeepSeek-V2-Lite": Latent(16), "DeepSeek-V3": Latent(128)}
DRY_LATENT = Latent(heads=6, dim=40, value_dim=24)
DRY_SIZES = Sizes(hidden=96, mlp=80, heads=4, kv_heads=2, dim=32, vocab=2600)


def add_norm(setup: Setup, model: str, tokens: int) -> Trial:
    tokens, hidden = setup.at_most(tokens), setup.sizes(model).hidden
    x_TD, delta_TD = setup.noise(tokens, hidden), setup.noise(tokens, hidden)
    weight_D, twin_TD = setup.noise(hidden), x_TD.clone()
    sum_TD = x_TD + delta_TD
    normed_TD = TORCH_OPS.add_norm(sum_TD.float(), None, weight_D.float(), EPS)
    return Trial(
        run=lambda: (ops_for("triton").add_norm(x_TD, delta_TD, weight_D, EPS), x_TD),
        expected=(normed_TD, sum_TD),
        tolerance=ROUNDING[setup.dtype],
        bytes=bytes_of(x_TD, x_TD, delta_TD, sum_TD, weight_D),
        twin=lambda: TORCH_OPS.add_norm(twin_TD, delta_TD, weight_D, EPS),
    )


def activation(setup: Setup, model: str, tokens: int, name: str) -> Trial:
    tokens, mlp = setup.at_most(tokens), setup.sizes(model).mlp
    gate_up_TF = setup.noise(tokens, 2 * mlp)
    twin_TF = gate_up_TF.clone()
    expected_TF = getattr(TORCH_OPS, name)(gate_up_TF.float().clone())
    return Trial(
        run=lambda: (getattr(ops_for("triton"), name)(gate_up_TF),),
        expected=(expected_TF,),
        tolerance=ROUNDING[setup.dtype],
        bytes=bytes_of(gate_up_TF) * 3 // 2,
        twin=lambda: getattr(TORCH_OPS, name)(twin_TF),
    )


@dataclass(slots=True)
class Slots:
    """The attention of a step that only says where K and V go, and gives back what it was given."""

    places: KVSlots
    given: Tensors = field(default=())

    def slots(self, layer: int) -> KVSlots:
        return self.places

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
        assert v_TKV is not None
        self.given = q_TNH, k_TKH, v_TKV
        return q_TNH


def rope_store(setup: Setup, model: str, tokens: int, *, norm: bool = True, pool: int = 0) -> Trial:
    """QK-norm, rope, and K and V into the last blocks of a pool that has at least `pool` numbers
    and is full of NaN."""
    sizes, tokens = setup.sizes(model), setup.at_most(tokens)
    memory = make_pool(setup, sizes, -(-tokens // BLOCK), pool)
    places = slots_in(kv_of(memory), LAYER, last_slots(memory, tokens))
    both = sizes.heads + sizes.kv_heads
    heads_TZH = setup.noise(tokens, both + sizes.kv_heads, sizes.dim)
    weights = HeadNorm(setup.noise(both, sizes.dim), EPS) if norm else None
    rope = Rope(RopeConfig(type="default", theta=1e6), sizes.dim, setup.dtype, setup.device)
    tables = rope.tables(torch.arange(1000, 1000 + tokens, device=setup.device))
    twin, twin_TZH = Slots(places), heads_TZH.clone()
    exact = HeadNorm(weights.weight_XH.float(), EPS) if weights else None
    exact_tables = tables[0].float(), tables[1].float()
    TORCH_OPS.attend(heads_TZH.float().clone(), sizes.heads, exact, exact_tables, 0, twin)
    q_TNH, k_TKH, v_TKH = twin.given
    stored = torch.stack([k_TKH, v_TKH], 1)
    kv_of(memory).fill_(torch.nan)  # on a CPU the twin stores, too

    return Trial(
        run=lambda: (
            ops_for("triton").attend(heads_TZH, sizes.heads, weights, tables, 0, Slots(places)),
        ),
        read=lambda: (heads_TZH[:, : sizes.heads], stored_at(places), written(memory)),
        expected=(q_TNH, stored, torch.tensor(stored.numel())),
        tolerance=ROUNDING[setup.dtype],
        # Reads all heads; writes q and k in place, and k and v to the pool.
        bytes=bytes_of(heads_TZH, heads_TZH[:, :both], heads_TZH[:, sizes.heads :], *tables),
        twin=lambda: TORCH_OPS.attend(twin_TZH, sizes.heads, weights, tables, 0, twin),
    )


def store(setup: Setup, model: str, tokens: int) -> Trial:
    sizes, tokens = setup.sizes(model), setup.at_most(tokens)
    memory = make_pool(setup, sizes, -(-tokens // BLOCK), 0)
    places = slots_in(kv_of(memory), LAYER, last_slots(memory, tokens))
    k_TKH, v_TKH = (setup.noise(tokens, sizes.kv_heads, sizes.dim) for _ in range(2))
    expected = torch.stack([k_TKH, v_TKH], 1)

    def run() -> Tensors:
        store_kv(places, k_TKH, v_TKH)
        return ()

    return Trial(
        run=run,
        read=lambda: (stored_at(places), written(memory)),
        expected=(expected, torch.tensor(expected.numel())),
        tolerance=EQUAL,
        bytes=2 * bytes_of(k_TKH, v_TKH),
    )


def attention(
    setup: Setup,
    model: str,
    spans: Sequence[tuple[int, int]],
    *,
    exact: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    pool: int = 0,
    code: str | None = None,
) -> Trial:
    """Attention over rows (start, tokens), longest one-token rows first. Blocks are scattered over
    the pool; whatever no row may read is NaN. With `code`, the pool has codes of this dtype."""
    sizes = setup.sizes(model)
    spans = spans_of(setup, spans)
    memory = make_pool(setup, sizes, sum(map(blocks_of, spans)), pool)
    spec = AttentionSpec(
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        scale=sizes.dim**-0.5,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    return attention_over(setup, memory, spec, spans, exact=exact, code=code)


def latent_attention(
    setup: Setup,
    model: str,
    spans: Sequence[tuple[int, int]],
    *,
    exact: bool = False,
    code: str | None = None,
) -> Trial:
    """Attention over latent rows: k of all query heads and, as its first numbers, v."""
    latent, spans = DRY_LATENT if setup.dry else LATENTS[model], spans_of(setup, spans)
    dtype = str(setup.dtype).removeprefix("torch.")
    layout = KVLayout.of_fields(
        (KVField(LATENT, 1, latent.dim, dtype),),
        num_layers=LAYERS,
        block_size=BLOCK,
        chunk_blocks=1,
    )
    blocks = sum(map(blocks_of, spans)) + SPARE_BLOCKS
    memory = TorchMemory(layout, blocks, setup.device)
    memory.fields[LATENT].fill_(torch.nan)
    spec = AttentionSpec(
        num_heads=latent.heads,
        num_kv_heads=1,
        head_dim=latent.dim,
        scale=latent.dim**-0.5,
        value_dim=latent.value_dim,
        latent=True,
    )
    return attention_over(setup, memory, spec, spans, exact=exact, code=code)


def attention_over(
    setup: Setup,
    memory: TorchMemory,
    spec: AttentionSpec,
    spans: Sequence[tuple[int, int]],
    *,
    exact: bool,
    code: str | None = None,
) -> Trial:
    rows = fill_rows(memory, spans)
    sinks_N = torch.randn(spec.num_heads, device=setup.device) if spec.sinks else None
    specs = [spec] * LAYERS
    keys = layers_kv(memory, specs)[LAYER]
    if code is not None:
        memory = coded(memory, code)
    batch = batch_of(rows, memory.layout, setup.device)
    step = TritonAttention(memory, specs, exact=exact).begin(batch)
    tokens = sum(count for _, count in spans)
    # q is a slice of a wider tensor, as a model's projections give it.
    heads_TZH = setup.noise(tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    q_TNH, k_TKH, v_TKH = torch.split(heads_TZH, [spec.num_heads, *[spec.num_kv_heads] * 2], dim=1)
    expected_TNV = by_definition(keys, spec, rows, q_TNH, sinks_N)
    seen = [seen_keys(start, count, spec.window) for start, count in spans]
    both = spec.head_dim + spec.value_dim
    row_bytes = memory.layout.layer_bytes() // BLOCK
    moved = tokens * spec.num_heads * both * q_TNH.element_size()
    v = None if spec.latent else v_TKH
    return Trial(
        run=lambda: (step.attend(LAYER, q_TNH, k_TKH, v, stored=True, sinks_N=sinks_N),),
        expected=(expected_TNV,),
        tolerance=ROUNDING[setup.dtype],
        bytes=moved + sum(read for read, _ in seen) * row_bytes,
        operations=2 * spec.num_heads * both * sum(pairs for _, pairs in seen),
    )


def draw(setup: Setup, model: str, samples: int, **params: Any) -> Trial:
    samples, vocab = setup.at_most(samples), setup.sizes(model).vocab
    logits_SV = 4 * torch.randn(samples, vocab, device=setup.device)
    asked = [
        Sample(0, 100 + index, SamplingParams(seed=index, **params)) for index in range(samples)
    ]
    draws = draws_of(asked, setup.device)
    return Trial(
        run=lambda: (ops_for("triton").draw(logits_SV, draws),),
        expected=(TORCH_OPS.draw(logits_SV.clone(), draws),),
        tolerance=EQUAL,
        bytes=bytes_of(logits_SV),
        twin=lambda: TORCH_OPS.draw(logits_SV, draws),
        twin_waits=True,
    )


def put_sampled(setup: Setup, tokens: int) -> Trial:
    """The ids of the previous step's samples take their places among a step's tokens: every other
    token awaits one."""
    tokens = setup.at_most(tokens)
    ids_S = torch.randint(1 << 20, (tokens,), device=setup.device)
    places_T = torch.randperm(tokens, device=setup.device)
    even_T = torch.arange(tokens, device=setup.device) % 2 == 0
    awaits_T = places_T.where(even_T, torch.full_like(places_T, -1)).int()
    tokens_T = torch.arange(tokens, device=setup.device).int()
    expected_T = ids_S[places_T].where(even_T, tokens_T)
    twin_T = tokens_T.clone()

    def run() -> Tensors:
        ops_for("triton").put_sampled(tokens_T, awaits_T, ids_S)
        return (tokens_T,)

    return Trial(
        run=run,
        expected=(expected_T,),
        tolerance=EQUAL,
        bytes=bytes_of(awaits_T) + bytes_of(ids_S, tokens_T) // 2,
        twin=lambda: TORCH_OPS.put_sampled(twin_T, awaits_T, ids_S),
    )


def fixed_product(setup: Setup, outputs: int, inputs: int, tokens: int) -> Trial:
    """A product with a fixed tile, of `--batch-invariant on`. Its twin is the library's."""
    outputs, inputs = setup.at_most(outputs, DRY_OUTPUTS), setup.at_most(inputs, DRY_OUTPUTS)
    tokens = setup.at_most(tokens)
    weight_OI, x_TI = setup.noise(outputs, inputs), setup.noise(tokens, inputs)
    product = FIXED_TILE.product(weight_OI, None)
    expected_TO = x_TI.float() @ weight_OI.float().T
    return Trial(
        run=lambda: (product(x_TI),),
        expected=(expected_TO,),
        tolerance=ROUNDING[setup.dtype],
        bytes=bytes_of(weight_OI, x_TI) + expected_TO.numel() * x_TI.element_size(),
        operations=2 * tokens * outputs * inputs,
        twin=lambda: F.linear(x_TI, weight_OI),
    )


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a model. With `clamped` they have biases."""

    hidden: int
    size: int
    experts: int
    chosen: int
    clamped: ClampedSwiGLU | None = None


MIXTURES: Mapping[str, Mixture] = {
    "Qwen3-30B-A3B": Mixture(2048, 768, 128, 8),
    "gpt-oss-20b": Mixture(2880, 2880, 32, 4, ClampedSwiGLU(1.702, 7.0)),
}


def experts(setup: Setup, model: str, tokens: int) -> Trial:
    """All experts of a layer, each token with random ones. Other experts' weights are not read."""
    mixture, tokens = MIXTURES[model], setup.at_most(tokens)
    hidden, size = (setup.at_most(each, DRY_OUTPUTS) for each in (mixture.hidden, mixture.size))
    count, chosen = setup.at_most(mixture.experts), setup.at_most(mixture.chosen, 2)
    biased = mixture.clamped is not None
    weights = ExpertWeights(
        *(setup.noise(count, 2 * size, hidden) / hidden**0.5, setup.noise(count, hidden, size)),
        setup.noise(count, 2 * size) if biased else None,
        setup.noise(count, hidden) if biased else None,
        mixture.clamped,
    )
    x_TD = setup.noise(tokens, hidden)
    scores_TE = torch.rand(tokens, count, device=setup.device)
    ids_TC = scores_TE.topk(chosen).indices.sort(-1).values
    routes = Routes(ids_TC, torch.rand(tokens, chosen, device=setup.device))
    used = len(set(ids_TC.flatten().tolist()))
    return Trial(
        run=lambda: (ops_for("triton").experts(x_TD, routes, weights),),
        expected=(_wide_experts(x_TD, routes, weights),),
        tolerance=ROUNDING[setup.dtype],
        bytes=bytes_of(weights.gate_up_EGD, weights.down_EDF) * used // count
        + bytes_of(x_TD, x_TD),
        operations=2 * tokens * chosen * 3 * hidden * size,
        twin=lambda: experts_twin(x_TD, routes, weights),
        twin_waits=True,
    )


def _wide_experts(x_TD: torch.Tensor, routes: Routes, weights: ExpertWeights) -> torch.Tensor:
    """The twin in float32."""
    gate_up_bias_EG, down_bias_ED = weights.gate_up_bias_EG, weights.down_bias_ED
    wide = ExpertWeights(
        weights.gate_up_EGD.float(),
        weights.down_EDF.float(),
        None if gate_up_bias_EG is None else gate_up_bias_EG.float(),
        None if down_bias_ED is None else down_bias_ED.float(),
        weights.clamped,
    )
    return experts_twin(x_TD.float(), routes, wide)


def make_pool(setup: Setup, sizes: Sizes, blocks: int, least: int) -> TorchMemory:
    """A pool of NaN with these blocks, spare ones, and at least this many numbers."""
    layout = KVLayout(
        num_layers=LAYERS,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        block_size=BLOCK,
        dtype=str(setup.dtype).removeprefix("torch."),
        chunk_blocks=1,
    )
    numbers = layout.block_bytes // setup.dtype.itemsize
    if least and not setup.dry:
        blocks = max(blocks, least // numbers)
    memory = TorchMemory(layout, blocks + SPARE_BLOCKS, setup.device)
    kv_of(memory).fill_(torch.nan)
    return memory


def coded(memory: TorchMemory, code: str) -> TorchMemory:
    """A pool with the codes of another pool's numbers, which are then rounded as these."""
    layout = memory.layout.in_dtype(code)
    found = TorchMemory(layout, len(memory.pool) - 1, memory.pool.device)
    for name, numbers in memory.fields.items():
        codes, exponents = encoded(numbers, found.fields[name].dtype)
        found.fields[name].copy_(codes)
        found.fields[name + EXPONENTS].copy_(exponents)
        numbers.copy_(decoded(codes, exponents, numbers.dtype))
    return found


def last_slots(memory: TorchMemory, tokens: int) -> torch.Tensor:
    """The last slots of the pool, in random order."""
    slots = len(memory.pool) * BLOCK
    order = torch.randperm(tokens, device=memory.pool.device)
    return slots - tokens + order


def stored_at(places: KVSlots) -> torch.Tensor:
    """K and V [T, 2, K, H] at the slots."""
    block_T, offset_T = places.slots_T // BLOCK, places.slots_T % BLOCK
    parts = (part[block_T, :, offset_T] for part in (places.k_PKBH, places.v_PKBV))
    return torch.stack(list(parts), 1)


def written(memory: TorchMemory) -> torch.Tensor:
    """How many numbers of the pool are no longer NaN. Not of the whole pool at once, whose mask
    would be half as large."""
    return sum(
        (each.numel() - each.isnan().sum() for each in kv_of(memory).chunk(64)), torch.tensor(0)
    )


def spans_of(setup: Setup, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rows (start, tokens); in a dry run few and short ones."""
    some = [(setup.at_most(start, DRY_KEYS), setup.at_most(count)) for start, count in spans]
    return some[: setup.at_most(len(some))]


def blocks_of(span: tuple[int, int]) -> int:
    return -(-sum(span) // BLOCK)


def fill_rows(memory: TorchMemory, spans: Sequence[tuple[int, int]]) -> list[Row]:
    """Give each row random blocks of the pool, with noise for its tokens and NaN after them."""
    free = (torch.randperm(len(memory.pool) - 1)[: sum(map(blocks_of, spans))] + 1).tolist()
    chosen = torch.tensor(free, device=memory.pool.device)
    fields = [field[:, LAYER] for field in memory.fields.values()]
    for each in fields:
        shape = len(free), *each.shape[1:]
        each[chosen] = torch.randn(shape, device=each.device, dtype=each.dtype)
    rows = []
    for start, count in spans:
        blocks = blocks_of((start, count))
        own, free = free[:blocks], free[blocks:]
        past = (start + count) % BLOCK
        if past:
            for each in fields:
                each[own[-1], :, past:] = torch.nan
        rows.append(Row([0] * count, start, [BlockId(block) for block in own]))
    return rows


def by_definition(
    kv: LayerKV,
    spec: AttentionSpec,
    rows: Sequence[Row],
    q_TNH: torch.Tensor,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k * scale) v in float32, a row at a time. A head's sink is the score of one more
    key, without a value."""
    begin, group, out = 0, spec.num_heads // spec.num_kv_heads, []
    if sinks_N is None:
        sinks_N = torch.full((spec.num_heads,), -torch.inf, device=q_TNH.device)
    for row in rows:
        count = len(row.tokens)
        end = row.start + count
        k_NJH, v_NJV = (
            pages[list(row.blocks)]
            .float()
            .transpose(0, 1)
            .flatten(1, 2)[:, :end]
            .repeat_interleave(group, dim=0)
            for pages in (kv.k_PKBH, kv.v_PKBV)
        )
        q_NTH = q_TNH[begin : begin + count].float().transpose(0, 1)
        score_NTJ = q_NTH @ k_NJH.transpose(1, 2) * spec.scale
        if spec.soft_cap is not None:
            score_NTJ = spec.soft_cap * torch.tanh(score_NTJ / spec.soft_cap)
        position_T1 = torch.arange(row.start, end, device=q_TNH.device)[:, None]
        key_1J = torch.arange(end, device=q_TNH.device)[None, :]
        hidden_TJ = key_1J > position_T1
        if spec.window is not None:
            hidden_TJ |= key_1J <= position_T1 - spec.window
        sink_NT1 = sinks_N[:, None, None].expand(-1, count, 1)
        all_scores = torch.cat((score_NTJ.masked_fill(hidden_TJ, -torch.inf), sink_NT1), -1)
        weight_NTJ = all_scores.softmax(-1)[..., :-1]
        out.append((weight_NTJ @ v_NJV).transpose(0, 1))
        begin += count
    return torch.cat(out)


def seen_keys(start: int, count: int, window: int | None) -> tuple[int, int]:
    """How many keys a row reads, and how many pairs of a query and a key it computes."""
    ends = range(start + 1, start + count + 1)
    seen = [min(end, window or end) for end in ends]
    return min(start + count, (window or start + count) + count - 1), sum(seen)


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _step(rows: int, keys: int) -> list[tuple[int, int]]:
    """Decode rows with this many keys."""
    return [(keys - 1, 1)] * rows


def rows_of(count: int) -> str:
    return f"{count} row{'s' * (count > 1)}"


# (model, tokens): a decode step of one row, of many, and a prompt of a larger model.
STEPS = (("Qwen3-0.6B", 1), ("Qwen3-0.6B", 256), ("Qwen3-8B", 2048))
DECODES = ((1, 1024), (1, 8192), (8, 1024), (64, 1024), (256, 256), (256, 1024))
# The sampling that Qwen3's generation_config.json asks for.
QWEN3_DEFAULT = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "without filters": {},
    "top-k and top-p": QWEN3_DEFAULT,
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
}
GEMMA_LIMITS: Mapping[str, Any] = {"window": 4096, "soft_cap": 50.0}
GPT_OSS_WINDOW: Mapping[str, Any] = {"model": "gpt-oss-20b", "window": 128, "sinks": True}
LATENT_STEPS: Mapping[str, Sequence[tuple[int, int]]] = {
    "64 rows of 1024": _step(64, 1024),
    "1 row of 8192": _step(1, 8192),
    "a prompt of 1024": [(0, 1024)],
}
# Outputs and inputs of Qwen3-0.6B: its smallest and its largest product of a layer, and the head.
PRODUCTS = ((1024, 2048), (6144, 1024), (151_936, 1024))
ROWS: tuple[KernelRow, ...] = (
    *(
        KernelRow(
            f"attention, {rows_of(rows)} of {keys}", partial(attention, model=model, spans=spans)
        )
        for model in ("Qwen3-0.6B",)
        for rows, keys in DECODES
        for spans in (_step(rows, keys),)
    ),
    KernelRow(
        "attention, Qwen3-8B, 64 rows of 1024",
        partial(attention, model="Qwen3-8B", spans=_step(64, 1024)),
    ),
    *(
        KernelRow(
            f"attention, {exact}KV in {code}, 64 rows of 1024",
            partial(
                attention,
                model="Qwen3-0.6B",
                spans=_step(64, 1024),
                exact=bool(exact),
                code=code,
            ),
        )
        for code in CODES
        for exact in ("", "exact, ")
    ),
    KernelRow(
        "attention, KV in int8, 1 row of 8192",
        partial(attention, model="Qwen3-0.6B", spans=_step(1, 8192), code="int8"),
    ),
    KernelRow(
        "attention, KV in int8, a prompt of 1024",
        partial(attention, model="Qwen3-0.6B", spans=[(0, 1024)], code="int8"),
    ),
    KernelRow(
        "attention, DeepSeek-V2-Lite, KV in int8, 64 rows of 1024",
        partial(latent_attention, model="DeepSeek-V2-Lite", spans=_step(64, 1024), code="int8"),
    ),
    KernelRow(
        "attention, Gemma-2, 32 rows of 8192",
        partial(attention, model="Gemma-2-2B", spans=_step(32, 8192), **GEMMA_LIMITS),
    ),
    KernelRow(
        "attention, gpt-oss, 64 rows of 1024",
        partial(attention, model="gpt-oss-20b", spans=_step(64, 1024), sinks=True),
    ),
    KernelRow(
        "attention, gpt-oss, 1 row of 8192",
        partial(attention, model="gpt-oss-20b", spans=_step(1, 8192), sinks=True),
    ),
    KernelRow(
        "attention, gpt-oss, a mix in a window",
        partial(attention, spans=[*_step(31, 500), (77, 300)], **GPT_OSS_WINDOW),
    ),
    KernelRow(
        "attention, exact, gpt-oss, 64 rows of 1024",
        partial(attention, model="gpt-oss-20b", spans=_step(64, 1024), sinks=True, exact=True),
    ),
    KernelRow(
        "attention, exact, gpt-oss, a mix in a window",
        partial(attention, spans=[*_step(31, 500), (77, 300)], exact=True, **GPT_OSS_WINDOW),
    ),
    KernelRow(
        "attention, a prompt of 2048",
        partial(attention, model="Qwen3-0.6B", spans=[(0, 2048)]),
    ),
    KernelRow(
        "attention, 255 rows of 1024 and a prompt of 256",
        partial(attention, model="Qwen3-0.6B", spans=[*_step(255, 1024), (0, 256)]),
    ),
    KernelRow(
        "attention, exact, 64 rows of 1024",
        partial(attention, model="Qwen3-0.6B", spans=_step(64, 1024), exact=True),
    ),
    KernelRow(
        "attention, exact, 1 row of 8192",
        partial(attention, model="Qwen3-0.6B", spans=_step(1, 8192), exact=True),
    ),
    KernelRow(
        "attention, exact, a mix",
        partial(attention, model="Qwen3-0.6B", spans=[*_step(31, 500), (77, 300)], exact=True),
    ),
    *(
        KernelRow(
            f"latent attention, {model}, {name}",
            partial(latent_attention, model=model, spans=spans),
        )
        for model in LATENTS
        for name, spans in LATENT_STEPS.items()
    ),
    *(
        KernelRow(
            f"latent attention, exact, {model}, 64 rows of 1024",
            partial(latent_attention, model=model, spans=_step(64, 1024), exact=True),
        )
        for model in LATENTS
    ),
    KernelRow(
        "attention in a pool of 2^32 numbers",
        partial(attention, model="Qwen3-0.6B", spans=_step(8, 1000), pool=WIDE_POOL),
    ),
    *(
        KernelRow(
            f"draw, {name}, {rows_of(samples)}", partial(draw, model=model, samples=samples, **each)
        )
        for model in ("Qwen3-0.6B",)
        for name, each in SAMPLING.items()
        for samples in (1, 256)
    ),
    *(
        KernelRow(f"add and norm, {model}, {tokens}", partial(add_norm, model=model, tokens=tokens))
        for model, tokens in STEPS
    ),
    *(
        KernelRow(
            f"{name}, {model}, {tokens}",
            partial(activation, model=model, tokens=tokens, name=name),
        )
        for name, steps in (("silu_mul", STEPS), ("gelu_tanh_mul", [("Gemma-2-2B", 256)]))
        for model, tokens in steps
    ),
    *(
        KernelRow(
            f"rope and store, {model}, {tokens}", partial(rope_store, model=model, tokens=tokens)
        )
        for model, tokens in STEPS
    ),
    KernelRow(
        "rope and store without norm",
        partial(rope_store, model="Qwen3-8B", tokens=256, norm=False),
    ),
    KernelRow(
        "rope and store in a pool of 2^32 numbers",
        partial(rope_store, model="Qwen3-0.6B", tokens=256, pool=WIDE_POOL),
    ),
    KernelRow("ids of the previous step, 256 rows", partial(put_sampled, tokens=256)),
    KernelRow("store, Qwen3-0.6B, 256", partial(store, model="Qwen3-0.6B", tokens=256)),
    *(
        KernelRow(
            f"fixed tiles, {outputs} x {inputs}, {rows_of(tokens)}",
            partial(fixed_product, outputs=outputs, inputs=inputs, tokens=tokens),
        )
        for outputs, inputs in PRODUCTS
        for tokens in (1, 256)
    ),
    *(
        KernelRow(
            f"experts, {model}, {rows_of(tokens)}", partial(experts, model=model, tokens=tokens)
        )
        for model in MIXTURES
        for tokens in (1, 32, 2048)
    ),
)
