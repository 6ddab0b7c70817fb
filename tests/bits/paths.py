"""The paths on which one engine computes a request: each a row of PATHS.

In: a Bench. Out: nothing, or Differs. A path also checks that it is the path that its name says:
that KV came from a cache, that a sequence was preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from baton_engine import LLM
from baton_engine.core.engine_core import EngineCore
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from tests.bits.cells import (
    DRAWN,
    GREEDY,
    NEW_TOKENS,
    SUBJECTS,
    Answer,
    Bench,
    Subject,
    ids_in,
    others,
    run,
    token_of,
)
from tests.support.engines.proposers import Guesses, draft_model_of, drafter
from tests.support.engines.tiny_models import prompt_of

BLOCK = 16
AFTERWARDS = 8  # tokens after a preemption
DRAFTS = 5  # most in a row
POSITIONS = range(NEW_TOKENS - 4)  # 40 of a greedy request's tokens
SCHEDULING: tuple[Mapping[str, Any], ...] = (
    {
        **{"scheduling_policy": "priority", "enable_prefix_caching": False},
        **{"long_prefill_token_threshold": 20, "max_long_partial_prefills": 1},
    },
    {"max_num_partial_prefills": 1, "performance_mode": "throughput"},
)
IN_ONE_PIECE = {"enable_chunked_prefill": False, "max_batched_tokens": 350, "max_model_len": 350}


def subjects() -> list[Request]:
    return [subject.request() for subject in SUBJECTS]


def drafting(bench: Bench, right: int, **settings: Any) -> EngineCore:
    """An engine with drafts of which `right` of 10 are right."""
    answers = {key: ids_in(answer) for key, answer in bench.alone.items()}
    plain = bench.engine(**settings)
    made = drafter(Guesses(answers, right), most=DRAFTS, vocab_size=plain.info.vocab_size)
    return EngineCore(plain.info, plain.runner, drafter=made)


# --- batches and pieces ---------------------------------------------------------------------------


def in_crowds(bench: Bench) -> None:
    """In batches of 2 to 64 requests, which arrive before, with and after the subjects."""
    for size in bench.some((2, 3, 8, 17, 33, 64)):
        engine = bench.engine(kv_blocks=1500, max_batched_tokens=2048 if size > 33 else 256)
        rest = others(size - len(SUBJECTS), seed=size)
        third = -(-len(rest) // 3)
        found = run(engine, rest[:third], steps=3)
        run(engine, [*rest[third : 2 * third], *subjects()], found, steps=5)
        bench.check_all(f"in a batch of {size}", run(engine, rest[2 * third :], found))


def in_pieces(bench: Bench) -> None:
    for tokens in bench.some((1, 7, 16, 64, 256, 2048)):
        for requests in (subjects()[:1], subjects()[1:], [*others(5), *subjects()]):
            if tokens == 1 and len(requests) > 2:
                continue  # one token of one request per step
            answers = run(bench.engine(max_batched_tokens=tokens), requests)
            for subject in SUBJECTS:
                for choice in range(subject.params.n):
                    if (subject.name, choice) in answers:
                        label = f"pieces of {tokens} tokens, {len(requests)} requests"
                        bench.check(label, subject, answers[subject.name, choice], choice)


def with_scheduling_options(bench: Bench) -> None:
    """In pieces and an order that options choose, in a pool that is too small for all."""
    for options in (*(SCHEDULING if bench.thorough else SCHEDULING[:1]), IN_ONE_PIECE):
        rest = others(4, seed=len(options))
        engine = bench.engine(**{"kv_blocks": 28, "max_batched_tokens": 48, **options})
        found = run(engine, rest[:2], steps=2)
        requests = [
            replace(each, priority=number % 3 - 1)
            for number, each in enumerate([*rest[2:], *subjects()])
        ]
        bench.check_all(f"with {options}", run(engine, requests, found))
    skips = run(engine, [GREEDY.request("again", skip_reading_prefix_cache=True)])
    bench.check("without a look at the cache", GREEDY, skips["again", 0])
    cached = engine.load().cached_prompt_tokens_total
    engine.reset_prefix_cache()
    bench.check_all("after a reset of the cache", run(engine, subjects()))
    assert engine.load().cached_prompt_tokens_total == cached


def with_overlap(bench: Bench) -> None:
    engine = bench.engine(overlap="on")
    bench.check_all("alone, overlap on", run(engine, subjects()))
    engine = bench.engine(overlap="on", max_batched_tokens=48)
    bench.check_all("in a batch of 17, overlap on", run(engine, [*others(15), *subjects()]))


def several_choices(bench: Bench) -> None:
    """Choices share the prompt's KV; one alone has the same bits."""
    answers = run(bench.engine(), [GREEDY.request(n=4)])
    for choice in range(4):
        bench.check(f"choice {choice} of 4", GREEDY, answers[GREEDY.name, choice])
    bench.check("n = 1", DRAWN, run(bench.engine(), [DRAWN.request(n=1)])[DRAWN.name, 0])


def on_two_threads(bench: Bench) -> None:
    bench.check_all("two threads", run(bench.engine(threads=2), [*others(6), *subjects()]))
    bench.engine(threads=1)  # the number is the process'


def with_drafts(bench: Bench) -> None:
    """Tokens are computed beside drafts of the next ones, of which none to all are right."""
    for right in bench.some((10, 7, 3, 0)):
        engine = drafting(bench, right, max_batched_tokens=96)
        found = run(engine, [*others(6), *subjects()])
        bench.check_all(f"{right} of 10 drafts right", found)
        load = engine.load()
        assert load.drafted_tokens_total > 0
        assert load.accepted_drafts_total > 0 or right == 0


def with_a_draft_model(bench: Bench) -> None:
    """The drafts are those of a draft model, with blocks for a part of the requests."""
    plain = bench.engine(max_batched_tokens=96)
    second = bench.engine(kv_blocks=30, max_batched_tokens=48)
    made = drafter(draft_model_of(second, 48), most=5, vocab_size=plain.info.vocab_size)
    engine = EngineCore(plain.info, plain.runner, drafter=made)
    bench.check_all("a draft model", run(engine, [*others(6), *subjects()]))
    assert engine.load().accepted_drafts_total > 0


# --- KV that is there already ---------------------------------------------------------------------


def from_the_cache(bench: Bench) -> None:
    engine = bench.engine()
    bench.check_all("cold", run(engine, [*others(4), *subjects()]))
    before = engine.load().cached_prompt_tokens_total
    bench.check_all("warm", run(engine, subjects()))
    cached = sum((len(each.prompt) - 1) // BLOCK * BLOCK for each in SUBJECTS)
    assert engine.load().cached_prompt_tokens_total - before == cached
    for length in bench.some(range(BLOCK, len(GREEDY.prompt), 2 * BLOCK)):
        engine = bench.engine()
        begun = Subject("begun", GREEDY.prompt[:length], DRAWN.params)
        run(engine, [begun.request()])
        run(engine, [*others(3)], steps=2)
        bench.check(f"{length} cached", GREEDY, run(engine, [GREEDY.request()])[GREEDY.name, 0])
        assert engine.load().cached_prompt_tokens_total == length // BLOCK * BLOCK


def shared_with_running(bench: Bench) -> None:
    """Requests that run beside the subject hold the blocks of its prompt."""
    for steps in (1, 4):
        engine = bench.engine(max_batched_tokens=48)
        longer = [
            Subject("", (*GREEDY.prompt, *prompt_of(9, seed=number)), GREEDY.params).request(
                f"longer {number}"
            )
            for number in range(3)
        ]
        found = run(engine, [*longer, GREEDY.request("same")], steps=steps)
        run(engine, [*subjects()], found)
        bench.check_all(f"shared after {steps} steps", found)
        bench.check(f"the first of two after {steps} steps", GREEDY, found["same", 0])
        assert engine.load().cached_prompt_tokens_total > 0


def from_the_host_tier(bench: Bench) -> None:
    engine = bench.engine(kv_blocks=20, host_kv_memory=1 << 26, max_batched_tokens=64)
    bench.check_all("first", run(engine, subjects()))
    run(engine, others(12))
    bench.check_all("from the host tier", run(engine, subjects()))
    assert engine.load().host_prompt_tokens_total > 0


# --- interruptions --------------------------------------------------------------------------------


def preempted(bench: Bench) -> None:
    """Preempted with each number of tokens, without and with drafts; a bench that is not thorough
    takes turns. Every other time its KV is evicted meanwhile."""
    for place, known in enumerate(bench.some(range(1, NEW_TOKENS))):
        if bench.thorough or place % 2 == 0 or known >= NEW_TOKENS - DRAFTS:
            preempted_at(bench, known, bench.engine())
        if bench.thorough or place % 2 == 1:
            preempted_at(bench, min(known, NEW_TOKENS - DRAFTS - 1), drafting(bench, 7))


def preempted_at(bench: Bench, known: int, engine: EngineCore) -> None:
    """Preempted with `known` tokens, or the next number that a step with drafts gives it."""
    end = min(NEW_TOKENS, known + AFTERWARDS)
    found = run(engine, [*others(2, seed=known), GREEDY.request(max_tokens=end)], steps=1)
    while len(found.get((GREEDY.name, 0), ())) < known:
        run(engine, [], found, steps=1)
    victim = engine._scheduler.running[-1]  # the youngest, as the scheduler chooses
    assert victim.state.request.id == GREEDY.name
    engine._scheduler._preempt(victim)
    if known % 2:
        engine._pool.release(engine._pool.allocate(engine._pool.num_free))
    answer = run(engine, [], found)[GREEDY.name, 0]
    bench.check(f"preempted with {known} tokens", GREEDY, answer, end=end)
    assert engine.load().preemptions_total == 1


def in_a_small_pool(bench: Bench) -> None:
    """Too small for all requests: the youngest are preempted when older ones need blocks."""
    preemptions = 0
    for blocks in bench.some((18, 20, 22, 24, 28)):
        engine = bench.engine(kv_blocks=blocks, max_batched_tokens=64)
        bench.check_all(f"{blocks} blocks", run(engine, [*others(10, seed=blocks), *subjects()]))
        preemptions += engine.load().preemptions_total
    assert preemptions > 0


def taken_over(bench: Bench) -> None:
    """Continued after each of 40 tokens on another engine: all at once, and one by one."""
    positions = bench.some(POSITIONS)
    for together in (True, False):
        engine = bench.engine(kv_blocks=1500)
        found: dict[tuple[str, int], Answer] = {}
        for position in positions:
            known = ids_in(bench.expected(GREEDY)[:position])
            # A salt of its own: the position before has left its KV in the cache.
            request = GREEDY.request(f"after {position}", known=[known], salt=str(position))
            run(engine, [request], found, steps=0 if together else None)
        run(engine, [], found)
        for position in positions:
            answer = found[f"after {position}", 0]
            label = f"taken over after {position} tokens, {'together' if together else 'alone'}"
            bench.check(label, GREEDY, answer, begin=position)


# --- other ways in --------------------------------------------------------------------------------


def offline(bench: Bench) -> None:
    """By LLM.generate, alone and together."""
    llm = LLM(bench.folder, threads=1, kv_blocks=300, **bench.exact)
    for beside in (0, 7):
        rest = others(beside)
        outputs = llm.generate(
            [*(list(each.prompt_ids) for each in rest), *(list(each.prompt) for each in SUBJECTS)],
            [*(each.params for each in rest), *(each.params for each in SUBJECTS)],
        )
        found = {}
        for subject, output in zip(SUBJECTS, outputs[beside:], strict=True):
            for choice in output.outputs:
                pairs = zip(choice.token_ids, choice.logprobs or (), strict=True)
                found[subject.name, choice.index] = tuple(token_of(*each) for each in pairs)
        bench.check_all(f"LLM, beside {beside} others", found)


def as_a_prompt(bench: Bench) -> None:
    """The log-probabilities of a generated token are those of the same token in a prompt."""
    ids = ids_in(bench.expected(GREEDY))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=2)
    whole = Subject("", (*GREEDY.prompt, *ids), params).request("whole")
    for tokens in (7, 2048):
        engine = bench.engine(max_batched_tokens=tokens)
        engine.submit(whole)
        logprobs = []
        while engine.has_work():
            logprobs += [one for use in engine.step().prompts for one in use.logprobs]
        pairs = zip(ids, logprobs[-len(ids) :], strict=True)
        bench.check(f"in a prompt, {tokens} a step", GREEDY, tuple(token_of(*e) for e in pairs))


PATHS: Mapping[str, Callable[[Bench], None]] = {
    path.__name__.replace("_", " "): path
    for path in (
        *(in_crowds, in_pieces, with_overlap, several_choices, on_two_threads, with_drafts),
        with_a_draft_model,
        *(from_the_cache, shared_with_running, from_the_host_tier),
        *(preempted, in_a_small_pool, taken_over, offline, as_a_prompt),
        with_scheduling_options,
    )
}
