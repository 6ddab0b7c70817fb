"""Compiles kernels for an A100 (sm_80) or H100 (sm_90), without a GPU.

This is a separate process, because triton is either an interpreter or a compiler. In: nothing. Out,
on stdout: JSON with the bytes of shared memory that a program of each kernel takes. A kernel that
does not compile ends the process with the compiler's error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_engine.attention import triton_paged_attention, triton_store_kv
from baton_engine.layers import triton_activation, triton_norm, triton_rope_store
from baton_engine.sampling import triton_sampler, triton_topk_topp


@dataclass(frozen=True, kw_only=True)
class Build:
    """A kernel to compile. `types` lists the types of its arguments that are not constants, in
    order; a star marks a pointer."""

    kernel: Any
    types: str
    constants: dict[str, Any]
    arch: int = 90
    options: dict[str, Any] = field(default_factory=dict)


def builds() -> Iterator[Build]:
    yield from _attention("bf16", one_token=True, dim=128, programs=8, window=0, arch=90)
    yield from _attention("bf16", one_token=False, dim=128, programs=4, window=4096, arch=90)
    yield from _attention("bf16", one_token=False, dim=256, programs=1, window=0, arch=80)
    yield from _attention("bf16", one_token=True, dim=256, programs=8, window=4096, arch=90, cap=True)
    yield from _attention("fp32", one_token=False, dim=128, programs=1, window=0, arch=80)
    yield Build(
        kernel=triton_store_kv._store_kv,
        types="*i64 *bf16 i32 i32 *bf16 i32 i32 *bf16 i32 i32 i32",
        constants={"BLOCK": 16, "DIM": 128, "DIM_P": 128},
    )
    yield Build(
        kernel=triton_norm._add_norm,
        types="*bf16 *bf16 *bf16 *bf16 i32 fp32",
        constants={"HAS_DELTA": True, "BLOCK": 4096},
    )
    for gelu in (False, True):
        yield Build(
            kernel=triton_activation._activation_mul,
            types="*bf16 *bf16 i32",
            constants={"GELU": gelu, "BLOCK": triton_activation.BLOCK},
        )
    for rotary, has_norm in ((64, True), (48, False)):
        shape = {"QUERIES": 16, "ALL": 32, "BLOCK": 16, "HALF": 64, "HALF_P": 64, "HEADS": 16}
        yield Build(
            kernel=triton_rope_store._rotate_store,
            types="*bf16 *bf16 *bf16 *bf16 fp32 *bf16 *i64 i32 i32 i32 i32 i32 i32",
            constants={"HAS_NORM": has_norm, "ROTARY": rotary, **shape},
        )
    yield Build(
        kernel=triton_topk_topp._shape,
        types="*fp32 *i32 *fp32 *i32 i32 i32 i32",
        constants={"TILE": triton_topk_topp.TILE},
        options={"num_warps": 8},
    )
    yield Build(
        kernel=triton_sampler._draw,
        types="*fp32 *i32 *fp32 *i32 *fp32 *i32 i32 i32 i32",
        constants={"FILTERED": True, "TILE": triton_sampler.DRAW_TILE},
    )
    yield Build(kernel=triton_sampler._pick, types="*i64 *fp32 *i32 i32", constants={"TILES": 128})


def _attention(
    dtype: str,
    *,
    one_token: bool,
    dim: int,
    programs: int,
    window: int,
    arch: int,
    cap: bool = False,
    exact: bool = False,
) -> Iterator[Build]:
    group, item_bytes = 2, 4 if dtype == "fp32" else 2
    tile = triton_paged_attention.tile_shape(
        one_token, group, dim, item_bytes, exact=exact
    )
    split = triton_paged_attention.FIXED_SPLIT_KEYS if exact else triton_paged_attention.SPLIT_KEYS
    fixed = {"DIM": dim, "DIM_P": dim, "WINDOW": window, "PROGRAMS": programs, "KEYS": tile.keys}
    fixed |= {"SPLIT": max(split // tile.keys, 1), "EXACT": exact}
    shape = {"GROUP": group, "BLOCK": 16, "CAPPED": cap, "ONE_TOKEN": one_token}
    results, where = f"*{dtype} *fp32 *fp32 i32", "*i32 *i32 i32"
    yield Build(
        kernel=triton_paged_attention._attend,
        types=f"{results} {where} *i32 i32 *{dtype} i32 i32 fp32 fp32 *{dtype} i32 i32 i32",
        constants={**shape, **fixed, "QUERIES": tile.queries},
        arch=arch,
        options={
            "num_stages": tile.stages,
            "num_warps": tile.warps,
            "enable_fp_fusion": not exact,
        },
    )
    if programs > 1:
        yield Build(
            kernel=triton_paged_attention._join,
            types=f"{results} {where}",
            constants=fixed,
            arch=arch,
            options={"enable_fp_fusion": not exact},
        )


def compile_one(build: Build) -> int:
    """Compile a kernel and return a program's shared memory in bytes. Arguments on whose values
    triton specializes are assumed to be multiples of 16."""
    names, types = build.kernel.arg_names, iter(build.types.split())
    signature = {name: "constexpr" if name in build.constants else next(types) for name in names}
    assert next(types, None) is None, f"{build.kernel.__name__} has fewer arguments"
    even = {
        (param.num,): [["tt.divisibility", 16]]
        for param in build.kernel.params
        if signature[param.name].startswith(("*", "i")) and not param.do_not_specialize
    }
    values = {(names.index(name),): value for name, value in build.constants.items()}
    source = ASTSource(build.kernel, signature, values, even)
    target = GPUTarget("cuda", build.arch, 32)
    return int(triton.compile(source, target=target, options=build.options).metadata.shared)


def compile_all() -> dict[str, int]:
    results = {}
    for number, build in enumerate(builds()):
        results[f"{number}: {build.kernel.__name__}, sm_{build.arch}"] = compile_one(build)
    return results


if __name__ == "__main__":
    print(json.dumps(compile_all()))
