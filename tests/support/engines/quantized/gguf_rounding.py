"""Weights rounded to the nearest code of a GGUF type.

The package gguf rounds to some types itself. For those with blocks of 256 inputs, which it only
reads, the ranges of the numbers give the scales and minimums here; llama.cpp's own tool searches
for better ones.

Shapes: R rows, N blocks of 256 inputs, S parts of a block, each with a scale.
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize

Raw = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32]

BLOCK = 256
# The types that llama.cpp uses for rows that are not whole blocks.
OTHERWISE = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def type_for(kind: str, inputs: int) -> str:
    """`kind`, or what takes its place for rows of this many numbers."""
    return OTHERWISE[kind] if kind in OTHERWISE and inputs % BLOCK else kind


def rounded_blocks(kind: str, x_RI: Numbers) -> Raw:
    """Rows [R, bytes] of blocks of this type."""
    if kind not in OTHERWISE:
        found: Raw = quantize(x_RI, gguf.GGMLQuantizationType[kind])
        return found
    blocks = _q4_k if kind == "Q4_K" else _q6_k
    return blocks(x_RI.reshape(-1, BLOCK)).reshape(len(x_RI), -1)


def _q4_k(x_NI: Numbers) -> Raw:
    """Codes from 0 to 15, and 6 bits of a scale and of a minimum for each 32."""
    x = x_NI.reshape(len(x_NI), 8, 32)
    least_NS = np.minimum(x.min(2), 0)
    d_N1, scales_NS = _in_steps((x.max(2).clip(0) - least_NS) / 15, 63)
    m_N1, least_NS = _in_steps(-least_NS, 63)
    step = _kept(d_N1) * scales_NS
    shifted = x + (_kept(m_N1) * least_NS)[..., None]
    codes = _nearest(shifted, step[..., None], 0, 15).astype(np.uint8)
    s, m = scales_NS.astype(np.uint8), least_NS.astype(np.uint8)
    packed = np.concatenate(
        [
            s[:, :4] | s[:, 4:] >> 4 << 6,
            m[:, :4] | m[:, 4:] >> 4 << 6,
            s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
        ],
        1,
    )
    pairs = codes.reshape(-1, 4, 2, 32)
    halves = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(x), -1)
    return np.concatenate([_bytes(d_N1), _bytes(m_N1), packed, halves], 1)


def _q6_k(x_NI: Numbers) -> Raw:
    """Codes from -32 to 31, and 8 bits of a scale for each 16."""
    x = x_NI.reshape(len(x_NI), 16, 16)
    d_N1, scales_NS = _in_steps(np.abs(x).max(2) / 31, 127)
    step = _kept(d_N1) * scales_NS
    codes = (_nearest(x, step[..., None], -32, 31) + 32).astype(np.uint8)
    quarters = codes.reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    lower = np.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2)
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = lower.reshape(len(x), -1), upper.reshape(len(x), -1)
    return np.concatenate([*parts, scales_NS.astype(np.uint8), _bytes(d_N1)], 1)


def _in_steps(values_NS: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """A block's step, and each part's value in such steps, at most `most`."""
    step_N1 = values_NS.max(1, keepdims=True) / most
    return step_N1, _nearest(values_NS, _kept(step_N1), 0, most)


def _nearest(x: Numbers, step: Numbers, least: int, most: int) -> Numbers:
    steps = np.divide(x, step, out=np.zeros_like(x), where=step != 0)
    found: Numbers = np.rint(steps).clip(least, most)
    return found


def _kept(step: Numbers) -> Numbers:
    """The step as the file has it."""
    return step.astype(np.float16).astype(np.float32)


def _bytes(step_N1: Numbers) -> Raw:
    return step_N1.astype(np.float16).view(np.uint8)
