"""A request placed again with the tokens it has goes on as if undisturbed: cut at every position,
greedy and seeded, one choice and two, with each parameter that looks at the tokens so far."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import TokenOut
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams, StructuredOutput
from baton_text.artifacts import byte_artifacts, read_artifacts
from baton_text.grammar import Grammars, grammar_of
from baton_text.tokenizer import Tokenizer
from tests.support.engines.engine_core import Run, drive
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import small_engine

CASES = (
    "plain",
    "repetition",
    "frequency",
    "presence",
    "bias",
    "allowed",
    "bad words",
    "min tokens",
    "stop id",
    "prompt logprobs",
    "grammar",
    "all",
)
HOW = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 11, "top_p": 0.95, "min_p": 0.01},
}


PAIR = {
    "type": "array",
    "prefixItems": [{"type": "boolean"}, {"type": "string", "maxLength": 3}],
    "items": False,
    "minItems": 2,
}


def fields(case: str, plain: list[int], vocab: range) -> dict[str, Any]:
    """Parameters that change what `plain`, the ids without them, would have been."""
    allowed = (*vocab[:: len(vocab) // 12], *plain[:3])
    cases: dict[str, dict[str, Any]] = {
        "plain": {"logprobs": 2},
        "repetition": {"repetition_penalty": 1.6},
        "frequency": {"frequency_penalty": -2.0},
        "presence": {"presence_penalty": -2.0},
        "bias": {"logit_bias": ((plain[2], 4.0), (plain[4], -100.0))},
        "allowed": {"allowed_token_ids": allowed},
        "bad words": {"bad_words": (tuple(plain[1:3]), tuple(plain[3:6]), (plain[8],))},
        "min tokens": {"min_tokens": 7, "stop_token_ids": (plain[2], plain[9])},
        "stop id": {"stop_token_ids": (plain[9],)},
        "prompt logprobs": {"prompt_logprobs": 1},
        "grammar": {"structured": StructuredOutput(grammar_of("json", PAIR)), "logprobs": 1},
        "all": {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.7,
            "presence_penalty": 0.4,
            "logit_bias": ((plain[2], 2.0), (plain[4], -100.0)),
            "bad_words": (tuple(plain[:2]), (plain[5],)),
            "min_tokens": 4,
            "stop_token_ids": (plain[1],),
            "logprobs": 1,
            "prompt_logprobs": 0,
        },
    }
    return cases[case]


class Place:
    """Two engines of one kind: what one has begun the other goes on with."""

    def __init__(
        self,
        engines: tuple[EngineCore, EngineCore],
        grammars: Grammars,
        prompt: list[int],
        tokens: int,
        vocab: range,
    ) -> None:
        self.first, self.second = engines
        self.grammars = grammars
        self.prompt = tuple(prompt)
        self.tokens = tokens
        self.vocab = vocab
        self._names = count()

    def request(self, **params: Any) -> Request:
        """Its salt is its own: no other test's blocks are found."""
        name = f"r{next(self._names)}"
        values = SamplingParams(max_tokens=self.tokens, **params)
        return Request(
            id=RequestId(name),
            attempt=1,
            prompt_ids=self.prompt,
            params=values,
            outputs=((),) * values.n,
            salt=name,
        )

    def submit(self, engine: EngineCore, request: Request) -> None:
        structured = request.params.structured
        matcher = self.grammars.matcher(structured.grammar) if structured is not None else None
        engine.submit(request, matcher=matcher)

    def whole(self, request: Request) -> Run:
        self.submit(self.first, request)
        return drive(self.first)


def check_all_cuts(place: Place, request: Request) -> list[int]:
    """Go on from each cut of the undisturbed run at once; return the ids of its first choice."""
    whole = place.whole(request)
    ids = [whole.ids(request.id, choice) for choice in range(request.params.n)]
    cuts = {}
    for cut in range(max(map(len, ids)) + 1):
        # The choices are cut at different places.
        known = tuple(tuple(each[: max(0, cut - 2 * index)]) for index, each in enumerate(ids))
        cuts[cut] = msgspec.structs.replace(request, id=RequestId(f"{cut}"), outputs=known)
        place.submit(place.second, cuts[cut])
    run = drive(place.second)
    for again in cuts.values():
        for choice, outputs in enumerate(again.outputs):
            undisturbed = tokens_of(whole, request.id, choice)
            rest = tokens_of(run, again.id, choice)
            assert [told(each) for each in rest] == [
                told(each) for each in undisturbed[len(outputs) :]
            ], (again.id, choice)
            ended = [
                (each.finish, each.stop_id)
                for each in run.complete
                if (each.request, each.choice) == (again.id, choice)
            ]
            last = undisturbed[-1]
            assert ended == ([] if rest else [(last.finish, last.stop_id)]), (again.id, choice)
    assert sorted(run.finished) == sorted(again.id for again in cuts.values())
    return ids[0]


def tokens_of(run: Run, request: RequestId, choice: int) -> list[TokenOut]:
    return [each for each in run.tokens if (each.request, each.choice) == (request, choice)]


def told(token: TokenOut) -> tuple[Any, ...]:
    """All but the numbers that rounding may touch."""
    likeliest = [each.id for each in token.logprobs.top] if token.logprobs else []
    return token.offset, token.id, token.finish, token.stop_id, likeliest


def check_case(place: Place, case: str, how: str, n: int) -> None:
    plain = place.whole(place.request(**HOW[how], ignore_eos=True))
    plain_ids = plain.ids(plain.tokens[0].request)
    request = place.request(n=n, **HOW[how], **fields(case, plain_ids, place.vocab))
    ids = check_all_cuts(place, request)
    if case not in ("plain", "prompt logprobs"):
        assert ids != plain_ids, "the parameters changed nothing, so nothing was tested"


# --- on sim -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sims() -> Place:
    def build() -> EngineCore:
        settings = SimSettings(block_size=4, chunk_blocks=2, max_batched_tokens=50, eos_every=30)
        return build_sim(settings)

    grammars = Grammars(Tokenizer.from_artifacts(byte_artifacts()))
    return Place((build(), build()), grammars, list(range(45, 58)), 28, range(32, 127))


@pytest.mark.pairwise
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_a_simulated_request_goes_on_from_any_token(
    sims: Place, case: str, how: str, n: int
) -> None:
    check_case(sims, case, how, n)


# --- on torch -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama-gqa2-tied", "qwen3-gqa4"])
def tinies(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Place:
    folder = tiny_model(request.param)
    engines = small_engine(folder, kv_blocks=300), small_engine(folder, kv_blocks=300)
    tokenizer = Tokenizer.from_artifacts(read_artifacts(folder))
    grammars = Grammars(tokenizer, engines[0].info.vocab_size)
    return Place(engines, grammars, prompt_of(37, seed=8), 14, range(310))


@pytest.mark.pairwise
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_a_request_goes_on_from_any_token(tinies: Place, case: str, how: str, n: int) -> None:
    check_case(tinies, case, how, n)
