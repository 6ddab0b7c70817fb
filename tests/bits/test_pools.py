"""Pools of real processes give a request the bits of an engine alone.

A client compares ids and float32 log-probabilities over HTTP with those of an engine in the test's
process. Each model runs in one pool; each kind of pool runs models in both dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import msgspec
import pytest

from baton_protocol.link import Deltas, PrefillDone
from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_protocol.sampling import SamplingParams
from tests.bits.cells import (
    DTYPES,
    GREEDY,
    MODELS,
    SUBJECTS,
    Answer,
    Bench,
    Subject,
    others,
    run,
    token_of,
)
from tests.support.clients.http import Json
from tests.support.clients.mix import COMPLETIONS, ChoiceResult
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.engines.quantized.quantized_models import EACH_KIND
from tests.support.engines.tiny_models import prompt_of
from tests.support.pools.leaks import settle
from tests.support.pools.processes import Cluster
from tests.support.wires.wire import Passing
from tests.support.wires.witness import Trap

POOLS: Mapping[str, tuple[int, int]] = {"aggregated": (0, 1), "1+1": (1, 1), "2+2": (2, 2)}
CELLS = list(
    zip((*MODELS, *EACH_KIND), cycle((*DTYPES, *reversed(DTYPES))), cycle(POOLS), strict=False)
)
# KV in 8 bits: models, dtypes, pools, and values of --kv-cache-dtype.
EIGHT_BITS = (
    ("qwen3-head128", "bfloat16", "1+1", "int8"),
    ("deepseek-v3", "bfloat16", "2+2", "fp8"),
    ("mistral-window", "float32", "1+1", "fp8"),
)
# Nodes that draft tokens: what followed the last one where it last occurred, often wrongly.
DRAFTS = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}'
DRAFT_COUNTS = ("drafted_tokens", "accepted_drafts")
WITH_DRAFTS = (("llama-gqa4", "bfloat16", "1+1"), ("gemma2", "float32", "2+2"))


def flags(bench: Bench, drafts: str | None = None) -> list[str]:
    return [
        *(() if drafts is None else ("--speculative-config", drafts)),
        *("--model", str(bench.folder), "--dtype", bench.dtype, "--batch-invariant", "on"),
        *("--threads", "1", "--chunk-blocks", "1", "--kv-blocks", "600"),
        *("--max-batched-tokens", "48", "--kv-cache-dtype", bench.kv_cache_dtype),
    ]


def body_of(subject: Subject, *, stream: bool) -> Json:
    fields = msgspec.to_builtins(subject.params)  # those that are not the default
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(id): bias for id, bias in fields["logit_bias"]}
    return {
        **{"prompt": list(subject.prompt), "stream": stream, "return_token_ids": True},
        **{"return_tokens_as_token_ids": True, **fields},
    }


def answer_of(choice: ChoiceResult, params: SamplingParams) -> Answer:
    """The tokens of a completion's choice. The API adds the sampled token and those that the
    request names to the likeliest."""
    tokens = []
    for id, (name, logprob, likeliest, _) in zip(choice.ids, choice.logprobs, strict=True):
        assert name == f"token_id:{id}"
        candidates = [
            TokenLogprob(int(each.removeprefix("token_id:")), value)
            for each, value in list(likeliest.items())[: params.logprobs]
        ]
        named = (
            TokenLogprob(asked, likeliest[f"token_id:{asked}"])
            for asked in params.logprob_token_ids
        )
        position = PositionLogprobs(TokenLogprob(id, logprob), tuple(candidates), tuple(named))
        tokens.append(token_of(id, position))
    return tuple(tokens)


def send(
    pool: Cluster,
    subject: Subject,
    *,
    stream: bool = True,
    on_event: Callable[[StreamedAnswer], bool] = lambda answer: True,
) -> StreamedAnswer:
    answer = ask(pool.url, COMPLETIONS, body_of(subject, stream=stream), on_event)
    assert (answer.status, answer.error, answer.whole) == (200, None, True), answer
    return answer


def check_subjects(bench: Bench, pool: Cluster, label: str, beside: int = 0) -> None:
    """Send the subjects at once, beside others, streamed and not."""
    rest = [Subject(each.id, each.prompt_ids, each.params) for each in others(beside, seed=beside)]
    wanted = [(each, stream) for each in SUBJECTS for stream in (True, False)]
    with ThreadPoolExecutor(len(wanted) + beside + 1) as threads:
        ignored = [threads.submit(send, pool, each) for each in rest]
        futures = [threads.submit(send, pool, each, stream=stream) for each, stream in wanted]
        for (subject, _), future in zip(wanted, futures, strict=True):
            for number, choice in future.result().result.choices.items():
                answer = answer_of(choice, subject.params)
                bench.check(label, subject, answer, number)
        for each in ignored:
            each.result()


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize(
    ("model", "dtype", "kind", "kept", "drafts"),
    [pytest.param(*each, "auto", None, id="-".join(each)) for each in CELLS]
    + [pytest.param(*each, None, id="-".join(each)) for each in EIGHT_BITS]
    + [pytest.param(*each, "auto", DRAFTS, id=f"{'-'.join(each)}-drafts") for each in WITH_DRAFTS],
)
def test_a_pool_gives_a_request_the_bits_of_an_engine_alone(
    model: str,
    dtype: str,
    kind: str,
    kept: str,
    drafts: str | None,
    tiny_model: Callable[[str], Path],
) -> None:
    bench = Bench(tiny_model(model), dtype, kv_cache_dtype=kept)
    prefill, decode = POOLS[kind]
    router_flags = ["--handoff=always"] if prefill else []
    with Cluster(prefill, decode, flags=flags(bench, drafts), router_flags=router_flags) as pool:
        check_subjects(bench, pool, f"{kind}, cold, beside 12", beside=12)
        check_subjects(bench, pool, f"{kind}, warm")
        check_subjects(bench, pool, f"{kind}, warm, beside 30", beside=30)
        load = [node["load"] for node in pool.pool()["nodes"]]
        assert (sum(each["handoffs_total"] for each in load) > 0) == bool(prefill)
        accepted = [sum(each[f"{kind}_total"] for each in load) for kind in DRAFT_COUNTS]
        assert all(accepted) == (drafts is not None), accepted


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_with_scheduling_options_gives_a_request_the_bits_of_an_engine_alone(
    kind: str, tiny_model: Callable[[str], Path]
) -> None:
    bench = Bench(tiny_model("llama-gqa4"), "bfloat16")
    prefill, decode = POOLS[kind]
    options = [
        *("--scheduling-policy=priority", "--no-enable-prefix-caching"),
        *("--long-prefill-token-threshold=20", "--max-long-partial-prefills=1"),
    ]
    router_flags = ["--handoff=always"] if prefill else []
    nodes = [*flags(bench), *options]
    with Cluster(prefill, decode, flags=nodes, router_flags=router_flags) as pool:
        for label in ("cold", "warm"):
            check_subjects(bench, pool, f"{kind}, {label}, beside 12", beside=12)
        load = [node["load"] for node in pool.pool()["nodes"]]
        assert sum(each["cached_prompt_tokens_total"] for each in load) == 0
        assert (sum(each["handoffs_total"] for each in load) > 0) == bool(prefill)


def test_each_kind_of_pool_has_both_dtypes() -> None:
    assert {(kind, dtype) for _, dtype, kind in CELLS} == {
        (kind, dtype) for kind in POOLS for dtype in DTYPES
    }


# --- a node that dies under 44 requests -----------------------------------------------------------

POSITIONS = frozenset(range(1, 41))
LENGTH = 64  # tokens of an answer
ROUNDS = 30
STREAMS = [
    Subject(
        f"stream {number}",
        tuple(prompt_of(40, seed=100 + number)),
        msgspec.structs.replace(GREEDY.params, max_tokens=LENGTH),
    )
    for number in range(44)
]


@dataclass
class Moment:
    """The frame after which streams have `wanted` of the numbers of tokens that are `missing`; at
    the latest, the frame after which a stream is almost done."""

    missing: frozenset[int]
    wanted: int
    tokens: dict[str, int] = field(default_factory=dict)  # request -> its tokens at the router

    def is_now(self, seen: Passing) -> bool:
        if isinstance(seen.frame, PrefillDone):
            self.tokens[seen.frame.request] = 1
        if not isinstance(seen.frame, Deltas):
            return False
        self.tokens |= {each.request: each.offset + len(each.ids) for each in seen.frame.items}
        numbers = set(self.tokens.values())
        return len(numbers & self.missing) >= self.wanted or max(numbers) > LENGTH - 4


def killed_at(
    pool: Cluster, missing: frozenset[int], wanted: int, expected: Sequence[Answer]
) -> set[int]:
    """Start one stream per token of the first, kill their node when some have `wanted` of the
    `missing` numbers of tokens, and check all answers. Returns the numbers of tokens with which
    streams moved."""
    first, *rest = STREAMS
    pool.witness.forget()
    moment = Moment(missing, wanted)
    pool.witness.set_trap(Trap(moment.is_now, pool.nodes["decode-0"].kill, after=True))
    with ThreadPoolExecutor(len(STREAMS)) as threads:
        answers: list[Future[StreamedAnswer]] = []

        def start_next(answer: StreamedAnswer) -> bool:
            if len(answers) < min(len(rest), len(answer.result.choices[0].ids)):
                answers.append(threads.submit(send, pool, rest[len(answers)]))
            return True

        all_answers = [send(pool, first, on_event=start_next), *(each.result() for each in answers)]
    for subject, answer, right in zip(STREAMS, all_answers, expected, strict=True):
        assert answer_of(answer.result.choices[0], GREEDY.params) == right, subject
    last = [pool.witness.placements(each.prompt)[-1] for each in STREAMS]
    return {job.tokens for job in last if job.attempt > 1}


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize(
    ("model", "dtype", "kept", "drafts"),
    [
        ("gemma2", "bfloat16", "auto", None),
        ("llama-gqa4", "float32", "auto", None),
        ("llama-head64", "bfloat16", "int8", None),
        ("llama-gqa4 in w4a16 g32 zeros", "bfloat16", "auto", None),
        pytest.param("llama-gqa4", "bfloat16", "auto", DRAFTS, id="llama-gqa4-bfloat16-drafts"),
    ],
)
def test_answers_have_the_bits_of_an_engine_alone_when_their_node_is_killed_at_any_of_40_tokens(
    model: str,
    dtype: str,
    kept: str,
    drafts: str | None,
    tiny_model: Callable[[str], Path],
    record_property: Callable[[str, object], None],
) -> None:
    bench = Bench(tiny_model(model), dtype, kv_cache_dtype=kept)
    engine = bench.engine()
    expected = [run(engine, [each.request()])[each.name, 0] for each in STREAMS]
    missing, rounds = POSITIONS, 0
    with Cluster(1, 1, flags=flags(bench, drafts), router_flags=["--handoff=always"]) as pool:
        while missing and rounds < ROUNDS:
            rounds += 1
            # Streams that arrive together advance together, so later rounds ask for less.
            wanted = max(1, len(missing) * 3 // (4 * rounds))
            missing -= killed_at(pool, missing, wanted, expected)
            print(f"round {rounds}: left are {sorted(missing)}")
            pool.repair()
            settle(pool)
    assert not missing, f"not killed at {sorted(missing)}"
    record_property(
        "exactness",
        f"{model}, {dtype}, KV {kept}, drafts {drafts}: killed at 40 tokens in {rounds} rounds",
    )
