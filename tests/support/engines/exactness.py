"""Compares greedy ids with transformers' as the reference, within one tolerance rule.

A different batch shape changes the last bits of a logit. A difference is therefore accepted if the
two candidates' logits in the reference are within 1e-4, at most once per 1,000 compared positions.
The rest of that request is not compared, because it follows a different token.

Ids are greedy if each is the likeliest one after those before it. So one pass of transformers over
the prompt and the ids that an engine gave shows whether they are the reference; only if they are
not, transformers generates it, which takes 15 times as long. References are cached in the model's
folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

LOGIT_TOLERANCE = 1e-4
POSITIONS_PER_DIFFERENCE = 1000
CANDIDATES = 5


@dataclass(frozen=True)
class Reference:
    """Greedy ids, and each position's likeliest candidates as (id, logit), best first."""

    ids: tuple[int, ...]
    candidates: tuple[tuple[tuple[int, float], ...], ...]

    def gap(self, position: int, id: int) -> float:
        """Logit of the reference's token minus that of `id`; infinite if it is no candidate."""
        ranked = self.candidates[position]
        logits = dict(ranked)
        return ranked[0][1] - logits[id] if id in logits else float("inf")


@dataclass
class Tally:
    """Counts comparisons and accepted differences over any number of requests."""

    positions: int = 0
    requests: int = 0
    differences: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise if more differences were accepted than one per 1,000 positions (rounded up)."""
        allowed = -(-self.positions // POSITIONS_PER_DIFFERENCE)
        assert len(self.differences) <= allowed, f"{self}: {self.differences}"

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.positions} positions, "
            f"{len(self.differences)} differences within {LOGIT_TOLERANCE}"
        )


def compare(reference: Reference, ids: Sequence[int], tally: Tally, label: str = "") -> None:
    """Compare one request. Raise AssertionError if its first difference is beyond the tolerance."""
    tally.requests += 1
    assert len(ids) == len(reference.ids), f"{label}: {len(ids)} ids, not {len(reference.ids)}"
    for position, (expected, actual) in enumerate(zip(reference.ids, ids, strict=True)):
        tally.positions += 1
        if expected == actual:
            continue
        gap = reference.gap(position, actual)
        text = f"{label}: position {position} is {actual}, reference {expected}, logit gap {gap:g}"
        assert gap <= LOGIT_TOLERANCE, text
        tally.differences.append(text)
        return


def reference(
    folder: Path, prompt: Sequence[int], new_tokens: int, expected: Sequence[int] = ()
) -> Reference:
    """The greedy ids of transformers for a prompt in fp32, with EOS ignored. They do not depend on
    `expected`, but if they are equal to it, they are found faster."""

    def found() -> Found:
        checked = len(expected) == new_tokens and _check(folder, prompt, expected)
        return checked or _generate(folder, prompt, new_tokens)

    ids, candidates = _kept(folder, [list(prompt), new_tokens], found)
    return Reference(
        tuple(ids), tuple(tuple((int(id), float(x)) for id, x in row) for row in candidates)
    )


def reference_logprobs(folder: Path, prompt: Sequence[int]) -> list[float]:
    """The log-probability of each id after a prompt, by transformers in fp32."""
    import torch

    def found() -> list[float]:
        with torch.inference_mode():
            logits = reference_model(folder)(torch.tensor([list(prompt)])).logits[0, -1]
        logprobs: list[float] = logits.log_softmax(-1).tolist()
        return logprobs

    kept: list[float] = _kept(folder, [list(prompt), "log-probabilities"], found)
    return kept


def _kept(folder: Path, asked: object, find: Callable[[], object]) -> Any:
    """What `find` gives for what is asked of a model, as JSON that is kept in its folder."""
    name = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]
    place = folder / ".reference" / f"{name}.json"
    if not place.is_file():
        with one_thread():
            text = json.dumps(find())
        place.parent.mkdir(exist_ok=True)
        draft = place.with_suffix(f".{os.getpid()}")
        draft.write_text(text)
        draft.replace(place)
    return json.loads(place.read_text())


def compare_all(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    actual: Sequence[Sequence[int]],
    tally: Tally,
    label: str = "alone",
    *,
    new_tokens: int = 64,
) -> None:
    """Compare each prompt's ids with those of transformers."""
    for prompt, ids in zip(prompts, actual, strict=True):
        expected = reference(folder, prompt, new_tokens, ids)
        compare(expected, ids, tally, f"{label}, prompt of {len(prompt)}")


@lru_cache(maxsize=2)
def reference_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """More threads do not speed up a tiny model, and other test workers need the cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


Found = tuple[list[int], list[list[tuple[int, float]]]]  # ids and each position's candidates


def _check(folder: Path, prompt: Sequence[int], ids: Sequence[int]) -> Found | None:
    """Return `ids` with their candidates if they are greedy, from one pass over all of them."""
    import torch

    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([[*prompt, *ids[:-1]]])).logits[0]
    candidates = _candidates(logits[len(prompt) - 1 :])
    return (list(ids), candidates) if list(ids) == [row[0][0] for row in candidates] else None


def _generate(folder: Path, prompt: Sequence[int], new_tokens: int) -> Found:
    import torch

    ids = torch.tensor([list(prompt)])
    result = reference_model(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = result.sequences[0, len(prompt) :].tolist()
    candidates = _candidates(torch.cat(result.logits))
    if new != [row[0][0] for row in candidates] or len(new) != new_tokens:
        raise AssertionError("generate did not give the greedy ids of its own logits")
    return new, candidates


def _candidates(logits: Any) -> list[list[tuple[int, float]]]:
    """The likeliest ids of each position with their logits, best first."""
    top = logits.float().topk(CANDIDATES)
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in rows]
