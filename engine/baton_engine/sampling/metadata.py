"""Sampling parameters as columns of numbers, read by torch and by kernels.

In: sampling parameters, choices, positions. Out: six columns of 32-bit numbers:

    temperature   float32; 0 is greedy
    min_p         float32, ln(min_p); -inf keeps all tokens
    top_p         float32, the probability mass to keep; 2 keeps all
    top_k         uint32; 0 keeps all
    a, b          uint32, the two keys of the noise (see `gumbel`)

The first four columns and the noise's stream depend only on the request. They are computed once and
stay valid as long as a line of the batch belongs to the same request.

Shapes: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.interface import Sample
from baton_engine.kv.staging import stage
from baton_engine.sampling.gumbel import MASK_64, keys_at, noise_stream
from baton_protocol.sampling import SamplingParams

# Below this a temperature is greedy: dividing by it would overflow float32.
GREEDY_BELOW = 1e-5
# A mass this close below p counts as p: float32 cannot tell 0.4 + 0.25 + 0.15 + 0.1 from 0.9.
MASS_ROUNDING = 1e-6
MOST_TOP_K = (1 << 31) - 1  # more than any vocabulary; a request may ask for more
ALL_MASS = 2.0
COLUMNS = 6
TEMPERATURE, LOG_MIN_P, MASS, TOP_K, KEY_A, KEY_B = range(COLUMNS)

Columns = npt.NDArray[np.uint32]  # [6, S]
Streams = npt.NDArray[np.uint64]  # [S]


@dataclass(frozen=True, slots=True)
class Draws:
    """The columns on the host and on the device."""

    host_6S: Columns
    columns_6S: torch.Tensor  # int32
    filtered: bool  # whether any non-greedy sample has min-p, top-k or top-p


def draws_of(samples: Sequence[Sample], device: torch.device) -> Draws:
    columns_6S = shape_columns([sample.params for sample in samples])
    streams_S = streams_of(
        [sample.params for sample in samples], [sample.choice for sample in samples]
    )
    positions_S = np.array([sample.position for sample in samples], np.uint64)
    columns_6S[KEY_A], columns_6S[KEY_B] = keys_at(streams_S, positions_S)
    return Draws(columns_6S, stage(columns_6S.view(np.int32), device), is_filtered(columns_6S))


def shape_columns(params: Sequence[SamplingParams]) -> Columns:
    """The columns of the parameters; the key columns are 0."""
    columns_6S = np.zeros((COLUMNS, len(params)), np.uint32)
    temperature_S, log_min_p_S, mass_S = columns_6S[:TOP_K].view(np.float32)
    temperature_S[:] = [
        0.0 if is_greedy(sample_params) else sample_params.temperature for sample_params in params
    ]
    min_p_S = np.array([sample_params.min_p for sample_params in params])
    log_min_p_S[:] = np.log(min_p_S, out=np.full(len(params), -np.inf), where=min_p_S > 0)
    top_p_S = np.array([sample_params.top_p for sample_params in params])
    mass_S[:] = np.where(top_p_S < 1, top_p_S - MASS_ROUNDING, ALL_MASS)
    columns_6S[TOP_K] = [min(max(sample_params.top_k, 0), MOST_TOP_K) for sample_params in params]
    return columns_6S


def streams_of(params: Sequence[SamplingParams], choices: Sequence[int]) -> Streams:
    seeds_S = np.array([(sample_params.seed or 0) & MASK_64 for sample_params in params], np.uint64)
    streams_S: Streams = noise_stream(seeds_S, np.array(choices, np.uint64))
    return streams_S


def is_filtered(columns_6S: Columns) -> bool:
    temperature_S, log_min_p_S, mass_S = columns_6S[:TOP_K].view(np.float32)
    filters_S = (log_min_p_S > -np.inf) | (mass_S < 1) | (columns_6S[TOP_K] > 0)
    return bool((filters_S & (temperature_S > 0)).any())


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW
