"""A pool of one prefill and one decode node gives the ids of transformers: every prompt is handed
off through Redis, and then the decode node is killed in mid-answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.support.clients.http import all_at_once, complete, ids_of
from tests.support.clients.mix import COMPLETIONS
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.engines.beam_reference import MODELS as BEAM_MODELS
from tests.support.engines.beam_reference import WIDTHS, beam_answers, beam_params, check_answers
from tests.support.engines.counting import COUNTING
from tests.support.engines.exactness import Tally, compare, reference
from tests.support.engines.quantized.quantized_models import EACH_KIND, model_folders
from tests.support.engines.tiny_models import BRIDGE_MODELS, EACH_FAMILY, VOCAB, prompt_of
from tests.support.pools.processes import Cluster

NEW_TOKENS = 40
LENGTHS = (1, 15, 16, 33, 70, 131, 200, 300)
HANDED_OFF = [prompt_of(length, seed=5) for length in LENGTHS]
FAILED_OVER = [prompt_of(length, seed=6) for length in LENGTHS]
# A layout that rounds the inputs of layers, as transformers with the plain weights does not.
ROUNDS_INPUTS = "w8a8"
KILLED_AT = 8  # tokens of the first answer
FLAGS = ("--dtype", "float32", "--threads", "1", "--chunk-blocks", "2", "--kv-blocks", "600")


@pytest.mark.long
@pytest.mark.shows("handed off", "failed over")
@pytest.mark.parametrize("name", [*EACH_FAMILY, *BRIDGE_MODELS])
def test_ids_equal_those_of_transformers_after_a_hand_off_and_after_a_killed_decode_node(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("exactness", checked(name))


@pytest.mark.long
@pytest.mark.parametrize("name", BEAM_MODELS)
def test_beams_equal_those_of_transformers_after_a_hand_off_and_after_a_killed_decode_node(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(name)
    with Cluster(
        1, 1, flags=("--model", str(folder), *FLAGS), router_flags=["--handoff=always"]
    ) as pool:
        for number, prompt in enumerate(HANDED_OFF[2:5]):
            check_beams(pool, folder, prompt, WIDTHS[number])
        assert sum(node["load"]["handoffs_total"] for node in pool.pool()["nodes"]) == 3
        victim = pool.nodes["decode-0"]

        def kill_when_searching() -> None:
            pool.wait(lambda: running(pool, "decode-0") > 1, "search on decode-0")
            victim.kill()

        with ThreadPoolExecutor(1) as threads:
            killing = threads.submit(kill_when_searching)
            check_beams(pool, folder, FAILED_OVER[-1], 4, max_tokens=400)
            killing.result()
        assert pool.witness.placements(FAILED_OVER[-1])[-1].attempt > 1


@pytest.mark.long
def test_a_logits_processor_changes_the_same_after_a_hand_off_and_a_killed_decode_node(
    tiny_model: Callable[[str], Path],
) -> None:
    folder, first = tiny_model("qwen3-gqa4"), 7
    flags = ("--model", str(folder), *FLAGS, "--logits-processors", COUNTING)
    with Cluster(1, 1, flags=flags, router_flags=["--handoff=always"]) as pool:
        found = killed(pool, vllm_xargs={"count_from": first})
        for prompt, ids in zip(FAILED_OVER, found, strict=True):
            begin = first + len(prompt)
            assert ids == [number % VOCAB for number in range(begin, begin + NEW_TOKENS)]
        assert any(pool.witness.placements(prompt)[-1].attempt > 1 for prompt in FAILED_OVER)


def running(pool: Cluster, name: str) -> int:
    nodes = pool.pool()["nodes"]
    return sum(node["load"]["running"] for node in nodes if node["id"] == name)


def check_beams(
    pool: Cluster, folder: Path, prompt: list[int], width: int, max_tokens: int = 18
) -> None:
    """Compare a pool's answers with those of transformers."""
    params = beam_params(width, max_tokens=max_tokens)
    if max_tokens > 18:  # a search that takes a while
        params = msgspec.structs.replace(params, stop_token_ids=(319,), early_stopping="never")
    answer = complete(
        pool.url,
        prompt,
        use_beam_search=True,
        n=width,
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=list(params.stop_token_ids),
        early_stopping=params.early_stopping,
    )
    expected = beam_answers(folder, prompt, params)
    check_answers(expected, ids_of(answer), f"{width} beams, prompt of {len(prompt)}")


@pytest.mark.long
@pytest.mark.parametrize("name", [each for each in EACH_KIND if not each.endswith(ROUNDS_INPUTS)])
def test_ids_of_quantized_weights_equal_those_of_transformers_with_the_same_numbers(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("exactness", checked(name))


def checked(name: str) -> str:
    """Compare the ids of a pool with those of transformers, and describe them."""
    folders, tally = model_folders(name), Tally()
    flags = ("--model", str(folders.folder), *FLAGS)
    with Cluster(1, 1, flags=flags, router_flags=["--handoff=always"]) as pool:
        answers = all_at_once(
            pool.url, HANDED_OFF, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True
        )
        for prompt, answer in zip(HANDED_OFF, answers, strict=True):
            [ids] = ids_of(answer)
            expected = reference(folders.plain, prompt, NEW_TOKENS, ids)
            compare(expected, ids, tally, "handed off")
        handoffs = [node["load"]["handoffs_total"] for node in pool.pool()["nodes"]]
        assert sum(handoffs) == len(HANDED_OFF)
        for prompt, ids in zip(FAILED_OVER, killed(pool), strict=True):
            expected = reference(folders.plain, prompt, NEW_TOKENS, ids)
            compare(expected, ids, tally, "failed over")
        moved = [pool.witness.placements(prompt)[-1].attempt > 1 for prompt in FAILED_OVER]
        assert any(moved)
    tally.check()
    return f"{name}, handed off and failed over: {tally}, {sum(moved)} moved"


def killed(pool: Cluster, **fields: object) -> list[list[int]]:
    """The ids of all answers. The decode node is killed when one has KILLED_AT tokens."""

    def kill(answer: StreamedAnswer) -> bool:
        if len(answer.result.choices[0].ids) >= KILLED_AT and pool.nodes["decode-0"].alive:
            pool.nodes["decode-0"].kill()
        return True

    def send(prompt: list[int]) -> list[int]:
        body = {
            **{"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
            **{"stream": True, "return_token_ids": True},
            **fields,
        }
        answer = ask(pool.url, COMPLETIONS, body, kill)
        assert (answer.status, answer.error, answer.whole) == (200, None, True), answer
        return answer.result.choices[0].ids

    with ThreadPoolExecutor(len(FAILED_OVER)) as threads:
        return list(threads.map(send, FAILED_OVER))
