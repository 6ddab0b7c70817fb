"""Apply the requests' logits parameters, vectorised over the step's samples.

In: raw logits and samples (parameters, banned ids, token counts for penalties). Out: logits after
these changes, in this order:

    grammar        ids that the grammar does not permit next: -inf
    allowed ids    all other ids: -inf
    banned ids     -inf
    logit_bias     logit + bias
    repetition     ids in prompt or outputs: logit / penalty if positive, else logit * penalty
    frequency      ids in the outputs: logit - penalty * count
    presence       ids in the outputs: logit - penalty
    own            logits processors of other packages

Biases, bans and penalties touch only the (sample, id) pairs that change.

Shapes: S samples, V vocabulary, N changed pairs or rows, B bytes of a grammar's mask.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.interface import ListedIds, PenaltyCounts, Sample
from baton_engine.kv.staging import stage
from baton_protocol.sampling import SamplingParams

Pairs = tuple[torch.Tensor, torch.Tensor]  # rows [N] and ids [N]


def change_logits(logits_SV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Change logits, float32 [S, V], in place, and return them."""
    listed = [sample.listed or ListedIds.of(sample.params) for sample in samples]
    _keep_matching(logits_SV, samples)
    _keep_allowed(logits_SV, listed)
    _ban(logits_SV, samples)
    _add_biases(logits_SV, listed)
    seen = [
        (row, sample.params, sample.penalty_counts)
        for row, sample in enumerate(samples)
        if sample.penalty_counts
    ]
    _penalise_repetition(logits_SV, seen)
    _penalise_outputs(logits_SV, seen)
    for row, sample in enumerate(samples):
        if sample.own is not None:
            for change in sample.own.changes:
                logits_SV[row] = change(logits_SV[row], sample.own.prompt, sample.own.outputs)
    return logits_SV


def _keep_matching(logits_SV: torch.Tensor, samples: Sequence[Sample]) -> None:
    """Set ids that a grammar's mask does not permit to -inf. Masks are packed bits, unpacked on the
    device. Ids beyond the end of a mask are not permitted."""
    matched = [
        (row, sample.matcher) for row, sample in enumerate(samples) if sample.matcher is not None
    ]
    if not matched:
        return
    device, vocab = logits_SV.device, logits_SV.shape[1]
    width = -(-vocab // 8)
    packed = bytearray().join(sample.mask()[:width].ljust(width, b"\0") for _, sample in matched)
    bytes_NB = np.frombuffer(packed, np.uint8).reshape(len(matched), width)
    # Counted on the device: a copy from the host would wait until the forward pass is done.
    bit_8 = torch.arange(8, dtype=torch.uint8, device=device)
    bits_NB8 = stage(bytes_NB, device)[:, :, None] >> bit_8
    removed_NV = bits_NB8.bitwise_and_(1).eq(0).flatten(1)[:, :vocab]
    rows_N = stage(np.array([row for row, _ in matched]), device)
    logits_SV[rows_N] = logits_SV[rows_N].masked_fill(removed_NV, -torch.inf)


def _keep_allowed(logits_SV: torch.Tensor, listed: Sequence[ListedIds]) -> None:
    allowed = [(row, ids.allowed) for row, ids in enumerate(listed) if ids.allowed is not None]
    if allowed:
        pairs = _pairs(allowed, logits_SV.device)
        kept_N = logits_SV[pairs]
        rows = np.array([row for row, _ in allowed])
        logits_SV[stage(rows, logits_SV.device)] = -torch.inf
        logits_SV[pairs] = kept_N


def _ban(logits_SV: torch.Tensor, samples: Sequence[Sample]) -> None:
    banned = [(row, sample.banned) for row, sample in enumerate(samples) if sample.banned]
    if banned:
        logits_SV[_pairs(banned, logits_SV.device)] = -torch.inf


def _add_biases(logits_SV: torch.Tensor, listed: Sequence[ListedIds]) -> None:
    biased = [(row, ids) for row, ids in enumerate(listed) if ids.biased]
    if biased:
        device = logits_SV.device
        pairs = _pairs([(row, ids.biased) for row, ids in biased], device)
        bias_N = np.concatenate([np.asarray(ids.biases, np.float32) for _, ids in biased])
        # Accumulate, so an id that is listed twice gets the sum of its biases.
        logits_SV.index_put_(pairs, stage(bias_N, device), accumulate=True)


def _penalise_repetition(
    logits_SV: torch.Tensor, seen: Iterable[tuple[int, SamplingParams, PenaltyCounts]]
) -> None:
    ids: list[tuple[int, npt.NDArray[np.int64]]] = []
    penalties: list[float] = []
    for row, params, counts in seen:
        if params.repetition_penalty != 1.0:
            ids.append((row, np.concatenate([_array(counts.prompt), _array(counts.outputs)])))
            penalties.append(params.repetition_penalty)
    if not ids:
        return
    pairs = _pairs(ids, logits_SV.device)
    repeats = [len(counts) for _, counts in ids]
    penalty_N = stage(np.repeat(np.array(penalties, np.float32), repeats), logits_SV.device)
    logit_N = logits_SV[pairs]
    # An id in both prompt and outputs appears twice here and is written twice with the same value.
    logits_SV[pairs] = torch.where(logit_N > 0, logit_N / penalty_N, logit_N * penalty_N)


def _penalise_outputs(
    logits_SV: torch.Tensor, seen: Iterable[tuple[int, SamplingParams, PenaltyCounts]]
) -> None:
    ids: list[tuple[int, Collection[int]]] = []
    amounts: list[npt.NDArray[np.float32]] = []
    for row, params, each in seen:
        if each.outputs and (params.frequency_penalty or params.presence_penalty):
            counts = np.fromiter(each.outputs.values(), np.float32, len(each.outputs))
            ids.append((row, each.outputs.keys()))
            amounts.append(params.frequency_penalty * counts + params.presence_penalty)
    if ids:
        amount_N = stage(np.concatenate(amounts), logits_SV.device)
        logits_SV[_pairs(ids, logits_SV.device)] -= amount_N


def _pairs(lists: Sequence[tuple[int, Collection[int]]], device: torch.device) -> Pairs:
    """Row and id indexes (int64 on the device) of each (row, id) pair."""
    arrays = [_array(ids) for _, ids in lists]
    rows_N = np.repeat([row for row, _ in lists], [len(array) for array in arrays])
    return stage(rows_N, device), stage(np.concatenate(arrays), device)


def _array(ids: Collection[int]) -> npt.NDArray[np.int64]:
    """Ids as an int64 array. Does not copy an `array` or numpy array of int64."""
    if isinstance(ids, Sequence | np.ndarray):
        return np.asarray(ids, np.int64)
    return np.fromiter(ids, np.int64, len(ids))
