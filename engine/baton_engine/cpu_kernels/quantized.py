"""Products with quantized weights on a CPU: codes stay 4 or 8 bits in memory, and become numbers in
registers.

In: rows x [T, I] and packed weights, one or one per expert. Out: [T, O].

The weights are packed in blocks of 64 outputs (see `quantized_block`). An output is a chain of
additions for each group of inputs; the groups' sums, times their scales, are added in ascending
order. Up to 8 rows are computed at a time, in the same order as one, so the bits of a row depend
neither on other rows nor on threads. Sums are float32, also for rows in bfloat16, and the result is
rounded once. Threads take in turn what is a block and a part of the rows.

Shapes: T rows, O and I a linear's output and input size, E experts, 1 for a linear layer, G groups
of inputs, P computed rows, U parts of them; B blocks, H pairs of inputs, Y bytes of a pair's codes
in a block, W outputs of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton_engine.config.quantization.scheme import BITS, Numbers
from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.openmp import (
    COUNTER,
    inlined,
    keep_until_here,
    run_kernel,
    task_class,
)
from baton_engine.cpu_kernels.quantized_block import (
    PAIR_BYTES,
    PART_ROWS,
    VECTORS,
    BlockKind,
    Decoding,
    byte_sum,
    group_product,
    group_unpacking,
    places_of_bytes,
    row_sum,
)
from baton_engine.cpu_kernels.vectors import (
    COLUMNS,
    add,
    broadcast,
    fma,
    load,
    load_address,
    load_number,
    multiply,
    rounded_to_bf16,
    store,
    store_address,
    store_bf16,
    take_next,
    zeros,
)
from baton_engine.memory.huge_pages import move_to_huge_pages

# Rows that are multiplied together, and their bytes of sums.
ROWS, ROW_SUMS = 6, 4 * COLUMNS
# With several tables, of which a lookup takes longer, more rows share one. Of 7 and 8 rows, whose
# codes have one table, two halves are faster than 6 and the rest.
ROWS_OF_TABLES, HALF_ROWS = 8, 4
# With more rows, the numbers of some groups are stored and read again, up to this number of pairs
# unless a group has more. Looking them up twice is faster than that with AVX-512 BF16, and slower
# in float32.
FEW_ROWS, FEW_FP32_ROWS = 24, 6
STORED_PAIRS = 64
# Pairs of a short group at most.
SHORT_PAIRS = 32
# Blocks that are packed together, which bounds the memory that packing takes.
PACKED_BLOCKS = 64
# A chain of additions has at most this number of inputs; larger groups are several with one scale.
CHAIN = 512

# Numbers of weights that are not quantized, and of int8 weights for inputs in int8.
Stored = Numbers | Literal["bf16", "fp32", "integers"]
PLAIN = ("bf16", "fp32")

# NUMBA_CPU_NAME compiles for another CPU than this one.
_FEATURES = {} if numba.config.CPU_NAME else llvm.get_host_cpu_features()
_WIDE = bool(_FEATURES.get("avx512f"))
_INTEGERS = all(_FEATURES.get(name) for name in ("avx512vnni", "avx512bw"))
_NATIVE = all(_FEATURES.get(name) for name in ("avx512bf16", "avx512vbmi", "avx512bw"))

# The argument of the kernels. The addresses are of arrays: `parts` int64 [U, 3], an expert and its
# rows [begin, end); `sources` and `targets` int64 [P], rows of `source` and `target`, or 0 if they
# are 0, 1, 2, ...; `codes` [E, B, H, Y], `scales` and `shifts` float32 [E, B, G, W], `bias` float32
# [E, B, W]; `factors` float32, one per row of `source`. `shifts`, `bias` and `factors` may be 0.
_Product = task_class(
    [
        COUNTER,
        *((name, np.int64) for name in ("part_count", "parts", "sources", "targets")),
        *((name, np.int64) for name in ("blocks", "pairs", "group_pairs", "groups", "codes")),
        *((name, np.int64) for name in ("scales", "shifts", "bias", "tables", "factors")),
        *((name, np.int64) for name in ("source", "source_bytes", "target", "outputs")),
        ("rounded", np.int64),
    ]
)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in blocks of outputs, or one per expert. Outputs and inputs that complete a block or
    a pair have any code and the scale 0, or an input that is 0."""

    numbers: Stored
    codes_EBHY: torch.Tensor  # uint8
    scales_EBGW: torch.Tensor  # float32
    shifts_EBGW: torch.Tensor | None
    bias_EBW: torch.Tensor | None  # float32
    table: tuple[float, ...]  # the numbers of 4-bit codes
    group: int
    outputs: int
    inputs: int
    # The kernel and the part of its argument that all products have, by the dtype of rows.
    tasks: dict[torch.dtype, tuple[Any, Any]] = field(default_factory=dict, init=False, repr=False)

    @property
    def columns(self) -> int:
        """Outputs with those that complete a block."""
        return self.codes_EBHY.shape[1] * COLUMNS

    def task(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """The kernel for rows of `dtype`, and its argument without what differs by step."""
        found = self.tasks.get(dtype)
        if found is None:
            kernel, tables = _kernel_of(self, dtype)
            _, blocks, pairs, _ = self.codes_EBHY.shape
            task = _Product(blocks=blocks, pairs=pairs, outputs=self.columns)
            task.groups = self.scales_EBGW.shape[2]
            task.group_pairs = -(-self.group // (4 if self.numbers == "integers" else 2))
            task.codes = self.codes_EBHY.data_ptr()
            if self.numbers not in PLAIN:
                task.scales = self.scales_EBGW.data_ptr()
            if self.shifts_EBGW is not None:
                task.shifts = self.shifts_EBGW.data_ptr()
            if self.bias_EBW is not None:
                task.bias = self.bias_EBW.data_ptr()
            task.tables = tables.data_ptr()
            task.source_bytes = pairs * (8 if dtype == torch.float32 else 4)
            found = self.tasks[dtype] = kernel, task
        return found


@dataclass(frozen=True, slots=True)
class Places:
    """Which row of x each computed row is, and which row of the outputs."""

    sources_P: npt.NDArray[np.int64]
    targets_P: npt.NDArray[np.int64]

    def addresses(self) -> tuple[int, int]:
        return self.sources_P.ctypes.data, self.targets_P.ctypes.data


def can_pack(group: int, inputs: int) -> bool:
    """Whether no group but the last ends within a pair of inputs."""
    return group % 2 == 0 or group >= inputs


def pack_weight(
    numbers: Numbers,
    codes_EOI: Callable[[int, slice], torch.Tensor],
    scales_EOG: torch.Tensor,
    shifts_EOG: torch.Tensor | None,
    bias_EO: torch.Tensor | None,
    table: tuple[float, ...],
    group: int,
    inputs: int,
) -> PackedWeight:
    """`codes_EOI` gives some outputs' codes of an expert, uint8 [O, I]."""
    experts, outputs, _ = scales_EOG.shape
    group = min(group, inputs)
    if group > CHAIN and (group == inputs or group % CHAIN == 0):
        chains = torch.arange(-(-inputs // CHAIN)) * CHAIN // group
        scales_EOG = scales_EOG[..., chains]
        shifts_EOG = None if shifts_EOG is None else shifts_EOG[..., chains]
        group = CHAIN
    blocks, pairs = -(-outputs // COLUMNS), -(-inputs // 2)
    bits = BITS[numbers]
    codes_EBHY = torch.empty(experts, blocks, pairs, PAIR_BYTES * bits, dtype=torch.uint8)
    for expert in range(experts):
        for first in range(0, blocks, PACKED_BLOCKS):
            rows = slice(first * COLUMNS, min((first + PACKED_BLOCKS) * COLUMNS, outputs))
            codes_OI = codes_EOI(expert, rows)
            codes_OI = F.pad(codes_OI, (0, inputs % 2, 0, -len(codes_OI) % COLUMNS))
            codes_BWHN = codes_OI.view(-1, COLUMNS, pairs, 2)
            packed = _packed_halves(codes_BWHN) if bits == 4 else _packed_bytes(codes_BWHN)
            codes_EBHY[expert, first : first + PACKED_BLOCKS] = packed
    move_to_huge_pages(codes_EBHY.data_ptr(), codes_EBHY.nbytes)
    return PackedWeight(
        numbers=numbers,
        codes_EBHY=codes_EBHY,
        scales_EBGW=_in_blocks(scales_EOG),
        shifts_EBGW=None if shifts_EOG is None else _in_blocks(shifts_EOG),
        bias_EBW=None if bias_EO is None else _in_blocks(bias_EO[:, :, None]).squeeze(2),
        table=table,
        group=group,
        outputs=outputs,
        inputs=inputs,
    )


def multiplies_plain() -> bool:
    """Whether products with plain weights are faster here than a library's. Those in bfloat16 of
    CPUs with AMX are as fast for one row, and faster for many; float32 was not measured there."""
    return _NATIVE and not _FEATURES.get("amx-bf16")


def pack_plain(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> PackedWeight:
    """A bfloat16 or float32 weight with an even number of inputs."""
    outputs, inputs = weight_OI.shape
    blocks, group = -(-outputs // COLUMNS), min(CHAIN, inputs)
    bf16 = weight_OI.dtype == torch.bfloat16
    words = inputs // 2 if bf16 else inputs
    codes_EBWY = _packed_words(1, outputs, words, lambda _, rows: weight_OI[rows])
    return PackedWeight(
        numbers="bf16" if bf16 else "fp32",
        codes_EBHY=codes_EBWY.view(1, blocks, inputs // 2, -1),
        scales_EBGW=torch.ones(1).expand(1, blocks, -(-inputs // group), COLUMNS),
        shifts_EBGW=None,
        bias_EBW=None if bias_O is None else _in_blocks(bias_O[None, :, None]).squeeze(2),
        table=(),
        group=group,
        outputs=outputs,
        inputs=inputs,
    )


def can_pack_integers(group: int, inputs: int) -> bool:
    """Whether int8 weights are multiplied with inputs in int8 here."""
    return _INTEGERS and inputs % 4 == 0 and (group % 4 == 0 or group >= inputs)


def pack_integers(
    codes_EOI: Callable[[int, slice], torch.Tensor],
    scales_EOG: torch.Tensor,
    bias_EO: torch.Tensor | None,
    group: int,
    inputs: int,
) -> PackedWeight:
    """`codes_EOI` gives some outputs' codes of an expert, int8 [O, I]."""
    experts, outputs, _ = scales_EOG.shape

    def shifted(expert: int, rows: slice) -> torch.Tensor:
        return codes_EOI(expert, rows).view(torch.uint8) ^ 0x80

    return PackedWeight(
        numbers="integers",
        codes_EBHY=_packed_words(experts, outputs, inputs // 4, shifted),
        scales_EBGW=_in_blocks(scales_EOG),
        shifts_EBGW=None,
        bias_EBW=None if bias_EO is None else _in_blocks(bias_EO[:, :, None]).squeeze(2),
        table=(),
        group=min(group, inputs),
        outputs=outputs,
        inputs=inputs,
    )


def _packed_words(
    experts: int, outputs: int, pairs: int, rows_EOI: Callable[[int, slice], torch.Tensor]
) -> torch.Tensor:
    """[E, B, H, Y] of rows of words of 32 bits."""
    blocks = -(-outputs // COLUMNS)
    codes_EBHY = torch.empty(experts, blocks, pairs, PAIR_BYTES * 16, dtype=torch.uint8)
    words_EBHW = codes_EBHY.view(torch.int32)
    for expert in range(experts):
        for first in range(0, blocks, PACKED_BLOCKS):
            rows = slice(first * COLUMNS, min((first + PACKED_BLOCKS) * COLUMNS, outputs))
            words_OH = rows_EOI(expert, rows).contiguous().view(torch.int32)
            words_OH = F.pad(words_OH, (0, 0, 0, -len(words_OH) % COLUMNS))
            words_BWH = words_OH.view(-1, COLUMNS, pairs)
            words_EBHW[expert, first : first + PACKED_BLOCKS] = words_BWH.transpose(1, 2)
    move_to_huge_pages(codes_EBHY.data_ptr(), codes_EBHY.nbytes)
    return codes_EBHY


def _packed_halves(codes_BWHN: torch.Tensor) -> torch.Tensor:
    """[B, H, Y] of 4-bit codes: a word's codes are 2 inputs of 4 outputs."""
    blocks, _, pairs, _ = codes_BWHN.shape
    parts = codes_BWHN.view(blocks, VECTORS, LANES, pairs, 2).permute(0, 3, 2, 4, 1)
    parts = parts.reshape(blocks, pairs, PAIR_BYTES * 4, 2)
    return parts[..., 0] | parts[..., 1] << 4


def _packed_bytes(codes_BWHN: torch.Tensor) -> torch.Tensor:
    """[B, H, Y] of 8-bit codes."""
    blocks, _, pairs, _ = codes_BWHN.shape
    order = torch.tensor([output * 2 + one for output, one in places_of_bytes()])
    return codes_BWHN.permute(0, 2, 1, 3).reshape(blocks, pairs, -1)[..., order]


def _in_blocks(values_EOG: torch.Tensor) -> torch.Tensor:
    experts, outputs, groups = values_EOG.shape
    values = F.pad(values_EOG.float(), (0, 0, 0, -outputs % COLUMNS))
    values = values.view(experts, -1, COLUMNS, groups).transpose(2, 3)
    values = values.contiguous()
    move_to_huge_pages(values.data_ptr(), values.nbytes)
    return values


def signed_halves(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes as the sign and magnitude of the number + 1/2 (see `quantized_block`), uint8."""
    return (codes ^ ((codes >> 7) & 0x7F)).view(torch.uint8)


@cache
def _tables(numbers: Numbers, table: tuple[float, ...], native: bool) -> torch.Tensor:
    """What the kernels look up. Never freed: tasks have its address."""
    if BITS[numbers] == 4:
        exact = torch.tensor(table)
        if not native:
            return exact
        near = exact.bfloat16()
        rest = (exact - near.float()).bfloat16()
        return torch.cat([near, near, rest, rest])
    if numbers == "int8":
        found = (torch.arange(128) + 0.5).bfloat16()
    else:
        found = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).bfloat16()
    lower, upper = found.view(torch.uint8).view(128, 2).unbind(1)
    return torch.cat([upper, lower])


def _kernel_of(packed: PackedWeight, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """The kernel for rows of `dtype`, and its tables."""
    bf16 = dtype == torch.bfloat16
    native = bf16 and _NATIVE
    if packed.numbers == "integers":
        return int8_integers, torch.empty(0)
    if packed.numbers == "bf16":
        return bf16_plain, torch.empty(0)
    if packed.numbers == "fp32":
        return fp32_plain, torch.empty(0)
    tables = _tables(packed.numbers, packed.table, native)
    if BITS[packed.numbers] == 8:
        names = {"int8": (fp32_int8, bf16_int8), "fp8": (fp32_fp8, bf16_fp8)}
        return names[packed.numbers][bf16], tables
    if native and tables[2 * len(packed.table) :].any():
        return bf16_two_tables, tables
    return bf16_table if bf16 else fp32_table, tables


def multiply_rows(
    x_TI: torch.Tensor,
    packed: PackedWeight,
    dtype: torch.dtype,
    factors_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """The outputs [T, O], in `dtype`, of the only weight. `factors_T`, float32, are multiplied with
    each row's sums."""
    rows = x_TI.shape[0]
    return _multiply(x_TI, packed, dtype, rows, _parts_of(rows), factors_T)


@dataclass(frozen=True, slots=True)
class _Parts:
    parts_U3: npt.NDArray[np.int64]
    address: int  # numpy takes a microsecond to give it


@lru_cache(maxsize=512)
def _parts_of(rows: int) -> _Parts:
    parts = max(1, -(-rows // PART_ROWS))
    size = max(1, -(-rows // (parts * ROWS))) * ROWS
    found = [(0, begin, min(begin + size, rows)) for begin in range(0, rows, size)]
    parts_U3 = np.array(found, np.int64)
    return _Parts(parts_U3, parts_U3.ctypes.data)


def multiply_parts(
    x_TI: torch.Tensor,
    packed: PackedWeight,
    dtype: torch.dtype,
    parts_U3: npt.NDArray[np.int64],
    factors_T: torch.Tensor | None = None,
    places: Places | None = None,
) -> torch.Tensor:
    """The outputs [P, O] of parts of at most PART_ROWS rows, each with an expert: its number, and
    its rows [begin, end)."""
    rows = len(x_TI) if places is None else len(places.targets_P)
    parts = _Parts(parts_U3, parts_U3.ctypes.data)
    return _multiply(x_TI, packed, dtype, rows, parts, factors_T, places)


def _multiply(
    x_TI: torch.Tensor,
    packed: PackedWeight,
    dtype: torch.dtype,
    rows: int,
    parts: _Parts,
    factors_T: torch.Tensor | None,
    places: Places | None = None,
) -> torch.Tensor:
    if x_TI.dtype not in (torch.float32, torch.bfloat16, torch.int8):
        x_TI = x_TI.float()
    rounded, columns = dtype == torch.bfloat16, packed.columns
    out_PO = torch.empty(rows, columns, dtype=torch.bfloat16 if rounded else torch.float32)
    if rows:
        x_TI = F.pad(x_TI, (0, 1)) if packed.inputs % 2 else x_TI.contiguous()
        kernel, whole_task = packed.task(x_TI.dtype)
        task = type(whole_task).from_buffer_copy(whole_task)
        task.part_count, task.parts = len(parts.parts_U3), parts.address
        if places is not None:
            task.sources, task.targets = places.addresses()
        if factors_T is not None:
            task.factors = factors_T.data_ptr()
        task.source, task.target = x_TI.data_ptr(), out_PO.data_ptr()
        task.rounded = rounded
        run_kernel(kernel, task)
    if columns != packed.outputs:
        out_PO = out_PO[:, : packed.outputs].contiguous()
    return out_PO if out_PO.dtype == dtype else out_PO.to(dtype)


def _compiled_for(bits: int, decoding: Decoding, bf16: bool) -> Any:
    """The compiled code of a kernel."""
    native = bf16 and _NATIVE
    kind = BlockKind(bits, decoding, bf16, native or decoding == "integers", _WIDE)
    integers, unpacked_bytes = kind.integers, kind.unpacked_bytes
    offset_of_numbers, halved = np.float32(-kind.offset), kind.offset != 0
    few_rows = PART_ROWS if bits >= 16 else FEW_ROWS if native else FEW_FP32_ROWS
    pair_bytes = PAIR_BYTES * bits
    several_tables, one_table = kind.several_tables, kind.looked_up and not kind.several_tables
    unpack = group_unpacking(kind)
    in_registers, in_memory = _product_of(kind), _stored_product_of(kind)

    def compute(pointer: Any) -> None:
        task = numba.carray(pointer, 1)[0]
        memory = np.empty(PART_ROWS * (ROW_SUMS + 8) + 64, np.uint8)
        # Groups that are computed together: all, if these rows are.
        stored_groups = max(1, STORED_PAIRS // task.group_pairs)
        ones = np.ones(task.groups * COLUMNS if task.scales == 0 else 1, np.float32)
        unpacked = np.empty(stored_groups * task.group_pairs * unpacked_bytes + 64, np.uint8)
        totals = (memory.ctypes.data + 63) // 64 * 64
        tile = (unpacked.ctypes.data + 63) // 64 * 64
        places = totals + PART_ROWS * ROW_SUMS
        # Of each group and row: the sum of the inputs, and where a chain of additions starts.
        summed = halved or task.shifts != 0
        all_sums = np.empty((task.groups if summed else 0, PART_ROWS), np.float32)
        all_starts = np.zeros((task.groups if halved else 1, PART_ROWS), np.float32)
        last = -1
        block_bytes = task.pairs * pair_bytes
        turn = take_next(pointer)
        while turn < task.part_count * task.blocks:
            following = take_next(pointer)
            part, block = turn // task.blocks, turn % task.blocks
            place = task.parts + 24 * part
            index = load_address(place) * task.blocks + block
            begin, end = load_address(place + 8), load_address(place + 16)
            rows = end - begin
            if part != last:
                for row in range(-(-rows // ROWS) * ROWS):
                    source = _row(task.sources, begin + min(row, rows - 1))
                    store_address(places + 8 * row, task.source + source * task.source_bytes)
                if summed:
                    _sum_rows(task, places, rows, bf16, integers, all_sums)
                    if halved:
                        all_starts[:, :rows] = all_sums[:, :rows] * offset_of_numbers
                last = part
            for total in range(totals, totals + rows * ROW_SUMS, 64):
                store(total, zeros())
            if task.shifts != 0:
                for group in range(task.groups):
                    shifts = task.shifts + (index * task.groups + group) * ROW_SUMS
                    _add_shifts(shifts, all_sums[group], rows, totals)
            together = task.groups if rows <= ROWS else stored_groups
            group = 0
            while group < task.groups:
                before = group * task.group_pairs
                # Whole groups, or the last, which may be shorter.
                count = min(together, (task.pairs - before) // task.group_pairs)
                pairs = task.group_pairs
                if count == 0:
                    count, pairs = 1, task.pairs - before
                offset = before * (4 if bf16 else 8)
                codes = task.codes + (index * task.pairs + before) * (PAIR_BYTES * bits)
                # A weight without scales has ones.
                scales = ones.ctypes.data
                if task.scales != 0:
                    scales = task.scales + (index * task.groups + group) * ROW_SUMS
                starts = all_starts.ctypes.data + 4 * PART_ROWS * (group if halved else 0)
                if rows > few_rows:
                    unpack(codes, pairs * count, task.tables, tile)
                # Plain weights of the next block are fetched while those of this one are
                # multiplied, a share for each of the first rows. They have one expert.
                ahead, ahead_step = codes, 0
                if following < task.part_count * task.blocks:
                    ahead = task.codes + following % task.blocks * block_bytes
                    ahead += before * pair_bytes
                    steps = -(-rows // ROWS)
                    ahead_step = max(64 * (bits // 16), -(-pair_bytes // steps))
                step = ROWS
                if several_tables and ROWS < rows <= few_rows:
                    step = ROWS_OF_TABLES
                elif one_table and ROWS < rows <= 2 * HALF_ROWS:
                    step = HALF_ROWS
                for row in range(0, rows, step):
                    some, here = min(step, rows - row), places + 8 * row
                    start, total = starts + 4 * row, totals + row * ROW_SUMS
                    here_ahead = ahead + row // ROWS * ahead_step * pairs * count
                    if rows > few_rows:
                        in_memory(some, tile, here, offset, pairs, count, start, scales, total)
                    else:
                        tables = task.tables
                        in_registers(
                            some,
                            codes,
                            here,
                            offset,
                            pairs,
                            count,
                            tables,
                            start,
                            scales,
                            total,
                            here_ahead,
                            ahead_step,
                        )
                group += count
            for row in range(rows):
                _finish(task, totals + row * ROW_SUMS, begin + row, index, block)
            turn = following
        keep_until_here(memory)
        keep_until_here(unpacked)
        keep_until_here(ones)

    return _inlined_as(f"compute_{bits}_{decoding}_{bf16}", compute)


def _product_of(kind: BlockKind) -> Any:
    """The product of up to ROWS rows with some groups; of ROWS_OF_TABLES with several tables."""
    one, two, four, six = (group_product(rows, kind, unpacked=False) for rows in (1, 2, 4, 6))
    eight = group_product(ROWS_OF_TABLES, kind, unpacked=False) if kind.several_tables else six

    def multiply_groups(
        rows: int,
        codes: int,
        places: int,
        offset: int,
        pairs: int,
        groups: int,
        tables: int,
        starts: int,
        scales: int,
        totals: int,
        ahead: int,
        ahead_step: int,
    ) -> None:
        weights = codes, places, offset, pairs, groups, tables
        given = (*weights, starts, scales, totals, ahead, ahead_step)
        if rows > ROWS:
            eight(*given)
        elif rows > 4:
            six(*given)
        elif rows > 2:
            four(*given)
        elif rows > 1:
            two(*given)
        else:
            one(*given)

    return _inlined_as(f"multiply_{kind.bits}_{kind.decoding}_{kind.bf16}", multiply_groups)


def _stored_product_of(kind: BlockKind) -> Any:
    """The product of up to ROWS rows with the stored numbers of some groups. Totals of 3 rows stay
    in registers, which is faster for short groups. For others 6 rows are, because they read the
    numbers once."""
    three, six = (group_product(rows, kind, unpacked=True) for rows in (3, 6))

    def multiply_stored(
        rows: int,
        numbers: int,
        places: int,
        offset: int,
        pairs: int,
        groups: int,
        starts: int,
        scales: int,
        totals: int,
    ) -> None:
        if rows > 3 and pairs > SHORT_PAIRS:
            six(numbers, places, offset, pairs, groups, 0, starts, scales, totals, 0, 0)
        else:
            for row in range(0, rows, 3):
                here, start, total = places + 8 * row, starts + 4 * row, totals + ROW_SUMS * row
                three(numbers, here, offset, pairs, groups, 0, start, scales, total, 0, 0)

    return _inlined_as(f"multiply_stored_{kind.bits}_{kind.decoding}_{kind.bf16}", multiply_stored)


def _inlined_as(name: str, function: Callable[..., None]) -> Any:
    """Compiled under a name of its own: compiled code of several processes, which is kept on disk,
    may be loaded into one, and numba numbers functions of the same name by process."""
    function.__name__ = function.__qualname__ = name.replace(" ", "_")
    return inlined(function)


@inlined
def _sum_rows(task: Any, places: int, rows: int, bf16: bool, integers: bool, sums: Any) -> None:
    """The sums [G, T] of the groups' inputs."""
    for group in range(task.groups):
        before = group * task.group_pairs
        pairs = min(task.group_pairs, task.pairs - before)
        for row in range(rows):
            place = load_address(places + 8 * row) + before * (4 if bf16 else 8)
            sums[group, row] = byte_sum(place, pairs) if integers else row_sum(place, pairs, bf16)


@inlined
def _add_shifts(shifts: int, sums: Any, rows: int, totals: int) -> None:
    """Add a group's shifts times the sums of its inputs."""
    for row in range(rows):
        found = broadcast(sums[row])
        for place in range(0, ROW_SUMS, 64):
            total = totals + row * ROW_SUMS + place
            store(total, fma(load(shifts + place), found, load(total)))


@inlined
def _row(rows: int, number: int) -> int:
    return load_address(rows + 8 * number) if rows != 0 else number


@inlined
def _finish(task: Any, totals: int, number: int, index: int, block: int) -> None:
    """Store a row's outputs of a block."""
    target = _row(task.targets, number) * task.outputs + block * COLUMNS
    for place in range(0, COLUMNS, LANES):
        output = load(totals + 4 * place)
        if task.factors != 0:
            factor = load_number(task.factors + 4 * _row(task.sources, number))
            output = multiply(output, broadcast(factor))
        if task.bias != 0:
            output = add(output, load(task.bias + index * ROW_SUMS + 4 * place))
        if task.rounded != 0:
            store_bf16(task.target + 2 * (target + place), rounded_to_bf16(output))
        else:
            store(task.target + 4 * (target + place), output)


_BF16_PLAIN: Any = _compiled_for(16, "bf16", True) if _NATIVE else None
_FP32_PLAIN = _compiled_for(32, "fp32", False)
_INT8_INTEGERS: Any = _compiled_for(16, "integers", True) if _INTEGERS else None
_BF16_TABLE = _compiled_for(4, "table", True)
_BF16_TWO_TABLES = _compiled_for(4, "two tables", True)
_BF16_INT8 = _compiled_for(8, "int8", True)
_BF16_FP8 = _compiled_for(8, "fp8", True)
_FP32_TABLE = _compiled_for(4, "table", False)
_FP32_INT8 = _compiled_for(8, "int8", False)
_FP32_FP8 = _compiled_for(8, "fp8", False)


def bf16_plain(pointer: Any) -> None:
    _BF16_PLAIN(pointer)


def fp32_plain(pointer: Any) -> None:
    _FP32_PLAIN(pointer)


def int8_integers(pointer: Any) -> None:
    _INT8_INTEGERS(pointer)


def bf16_table(pointer: Any) -> None:
    _BF16_TABLE(pointer)


def bf16_two_tables(pointer: Any) -> None:
    _BF16_TWO_TABLES(pointer)


def bf16_int8(pointer: Any) -> None:
    _BF16_INT8(pointer)


def bf16_fp8(pointer: Any) -> None:
    _BF16_FP8(pointer)


def fp32_table(pointer: Any) -> None:
    _FP32_TABLE(pointer)


def fp32_int8(pointer: Any) -> None:
    _FP32_INT8(pointer)


def fp32_fp8(pointer: Any) -> None:
    _FP32_FP8(pointer)
