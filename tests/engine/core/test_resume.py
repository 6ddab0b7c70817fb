"""A resumed request continues as if undisturbed: from every position, greedy and seeded, with one
and two choices, and with each parameter that depends on earlier tokens."""

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
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.grammars import Grammars
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
SAMPLING = {
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
    """Parameters that change the ids. `plain` are the ids without them."""
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


class EnginePair:
    """Two engines of one kind: the second continues requests of the first."""

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
        """A request with its own salt, so it reuses no blocks of other tests."""
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


def check_all_cuts(pair: EnginePair, request: Request) -> list[int]:
    """Continue from each position of the undisturbed run, all at once. Return the ids of the first
    choice."""
    whole = pair.whole(request)
    ids = [whole.ids(request.id, choice) for choice in range(request.params.n)]
    cuts = {}
    for cut in range(max(map(len, ids)) + 1):
        # The choices are cut at different lengths.
        known = tuple(tuple(each[: max(0, cut - 2 * index)]) for index, each in enumerate(ids))
        cuts[cut] = msgspec.structs.replace(request, id=RequestId(f"{cut}"), outputs=known)
        pair.submit(pair.second, cuts[cut])
    run = drive(pair.second)
    for resumed in cuts.values():
        for choice, outputs in enumerate(resumed.outputs):
            undisturbed = tokens_of(whole, request.id, choice)
            rest = tokens_of(run, resumed.id, choice)
            assert [comparable(each) for each in rest] == [
                comparable(each) for each in undisturbed[len(outputs) :]
            ], (resumed.id, choice)
            completed = [
                (each.finish, each.stop_id)
                for each in run.complete
                if (each.request, each.choice) == (resumed.id, choice)
            ]
            last = undisturbed[-1]
            assert completed == ([] if rest else [(last.finish, last.stop_id)]), (
                resumed.id,
                choice,
            )
    assert sorted(run.finished) == sorted(resumed.id for resumed in cuts.values())
    return ids[0]


def tokens_of(run: Run, request: RequestId, choice: int) -> list[TokenOut]:
    return [each for each in run.tokens if (each.request, each.choice) == (request, choice)]


def comparable(token: TokenOut) -> tuple[Any, ...]:
    """The token's fields that rounding cannot change."""
    top_ids = [each.id for each in token.logprobs.top] if token.logprobs else []
    return token.offset, token.id, token.finish, token.stop_id, top_ids


def check_case(pair: EnginePair, case: str, sampling: str, n: int) -> None:
    plain = pair.whole(pair.request(**SAMPLING[sampling], ignore_eos=True))
    plain_ids = plain.ids(plain.tokens[0].request)
    request = pair.request(n=n, **SAMPLING[sampling], **fields(case, plain_ids, pair.vocab))
    ids = check_all_cuts(pair, request)
    if case not in ("plain", "prompt logprobs"):
        assert ids != plain_ids, "the parameters changed nothing, so nothing was tested"


# --- simulated engine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sim_pair() -> EnginePair:
    def build() -> EngineCore:
        settings = SimSettings(block_size=4, chunk_blocks=2, max_batched_tokens=50, eos_every=30)
        return build_sim(settings)

    grammars = Grammars(Tokenizer.from_artifacts(byte_artifacts()))
    return EnginePair((build(), build()), grammars, list(range(45, 58)), 28, range(32, 127))


@pytest.mark.pairwise
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("case", CASES)
def test_a_simulated_request_continues_from_any_token(
    sim_pair: EnginePair, case: str, sampling: str, n: int
) -> None:
    check_case(sim_pair, case, sampling, n)


# --- torch engine -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama-gqa2-tied", "qwen3-gqa4"])
def torch_pair(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> EnginePair:
    folder = tiny_model(request.param)
    engines = small_engine(folder, kv_blocks=300), small_engine(folder, kv_blocks=300)
    tokenizer = Tokenizer.from_artifacts(read_artifacts(folder))
    grammars = Grammars(tokenizer, engines[0].info.vocab_size)
    return EnginePair(engines, grammars, prompt_of(37, seed=8), 14, range(310))


@pytest.mark.pairwise
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("case", CASES)
def test_a_request_on_torch_continues_from_any_token(
    torch_pair: EnginePair, case: str, sampling: str, n: int
) -> None:
    check_case(torch_pair, case, sampling, n)
