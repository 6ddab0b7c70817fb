"""The answers of transformers' beam search, cached in the model's folder.

In: a tiny model, a prompt, sampling parameters with a beam search. Out: ids and score of each
answer, the best first. Answers end with the parameters' stop_token_ids.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton_protocol.sampling import SamplingParams
from tests.support.engines.exactness import one_thread, reference_model

SCORE_TOLERANCE = 1e-4
# Several ids, so that some answers of random models end early.
STOPS = tuple(range(0, 320, 40))
MODELS = ("qwen3-gqa4", "llama-gqa2-tied", "mistral-window", "gemma2", "gpt2")
WIDTHS = (1, 2, 4)
RULES: tuple[tuple[float, bool | str], ...] = (
    (1.0, False),
    (0.5, True),
    (2.0, "never"),
    (-1.0, False),
    (0.0, "never"),
)


def beam_params(width: int, rule: int = 0, **more: object) -> SamplingParams:
    """A beam search of 18 tokens by one of the RULES."""
    penalty, early = RULES[rule]
    values = {
        **{"use_beam_search": True, "n": width, "max_tokens": 18, "ignore_eos": True},
        **{"stop_token_ids": STOPS, "length_penalty": penalty, "early_stopping": early},
    }
    return msgspec.convert(values | more, SamplingParams)


Answers = list[tuple[list[int], float]]


def beam_answers(folder: Path, prompt: Sequence[int], params: SamplingParams) -> Answers:
    key = json.dumps([list(prompt), msgspec.to_builtins(params)]).encode()
    place = folder / ".reference" / f"beams-{hashlib.sha256(key).hexdigest()[:24]}.json"
    if place.is_file():
        answers: Answers = json.loads(place.read_text())
        return answers
    with one_thread():
        answers = _generate(folder, prompt, params)
    place.parent.mkdir(exist_ok=True)
    draft = place.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(answers))
    draft.replace(place)
    return answers


def check_answers(expected: Answers, actual: Sequence[Sequence[int]], label: str) -> None:
    """Compare ids. Answers whose scores in the reference are all but equal may change places."""
    assert len(actual) == len(expected), label
    scores = {tuple(ids): score for ids, score in expected}
    for (ids, score), found in zip(expected, actual, strict=True):
        if ids != list(found):
            gap = abs(score - scores.get(tuple(found), float("inf")))
            assert gap <= SCORE_TOLERANCE, f"{label}: {found}, not {ids}"


def _generate(folder: Path, prompt: Sequence[int], params: SamplingParams) -> Answers:
    import torch

    ids, width = torch.tensor([list(prompt)]), params.n
    searches = {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
    result = reference_model(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_tokens,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        eos_token_id=list(params.stop_token_ids),
        pad_token_id=params.stop_token_ids[0],
        return_dict_in_generate=True,
        output_scores=True,
        **(searches if width > 1 else {}),
    )
    scores = [0.0] if width == 1 else result.sequences_scores.tolist()
    answers = []
    for row, score in zip(result.sequences[:, len(prompt) :].tolist(), scores, strict=True):
        end = next((at for at, id in enumerate(row) if id in params.stop_token_ids), len(row))
        answers.append((row[: end + 1], score))
    return answers
