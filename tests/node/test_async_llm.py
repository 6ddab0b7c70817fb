"""AsyncLLM: many generators at once, cancellations, errors, and the life of the engine process."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from baton_engine.config.engine_config import SimConfig
from baton_engine.errors import ModelError, SettingsError
from baton_engine.interface import PauseMode
from baton_engine.offline.outputs import CompletionOutput, RequestOutput
from baton_engine.offline.prompts import Prompt
from baton_node import AsyncLLM, EngineDeadError
from baton_node.errors import SetupError
from baton_protocol.errors import InvalidRequest, PromptTooLong
from tests.support.engines.offline import answers, sim_llm_engine
from tests.support.engines.tiny_models import prompt_of
from tests.support.nodes.processes import is_alive, until_gone
from tests.support.waiting import until

pytestmark = pytest.mark.integration

GENERATORS = 200
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
KINDS = tuple(RequestOutputKind)
ENDS = ("to the end", "to the end", "cancel", "break", "abort", "before the first")
ENDLESS = SamplingParams(max_tokens=8000, seed=1)


def sim_llm(**more: Any) -> AsyncLLM:
    return AsyncLLM(engine="sim", **({"kv_blocks": 500} | more))


async def last_output(
    llm: AsyncLLM, prompt: Prompt, params: SamplingParams, id: str | None = None
) -> RequestOutput:
    """The last output; of deltas, all put together."""
    choices: dict[int, CompletionOutput] = {}
    async for output in llm.generate(prompt, params, id):
        for choice in output.outputs:
            before = choices.get(choice.index)
            if params.output_kind is DELTA and before is not None:
                text, ids = before.text + choice.text, before.token_ids + choice.token_ids
                choice = replace(choice, text=text, token_ids=ids)
            choices[choice.index] = choice
    assert output.finished
    return replace(output, outputs=[choices[index] for index in sorted(choices)])


def requests(seed: int, prompt: Callable[[int], Prompt]) -> list[tuple[Prompt, SamplingParams]]:
    random_numbers = random.Random(seed)
    return [
        (
            prompt(number),
            SamplingParams(
                max_tokens=random_numbers.randint(1, 40),
                seed=number,
                n=random_numbers.choice([1, 1, 1, 2]),
                ignore_eos=True,
                output_kind=random_numbers.choice(KINDS),
                stream_interval=random_numbers.choice([None, 1, 5]),
            ),
        )
        for number in range(GENERATORS)
    ]


async def run_and_cancel(
    llm: AsyncLLM, given: Sequence[tuple[Prompt, SamplingParams]], seed: int
) -> dict[int, RequestOutput]:
    """Run all requests at once, of which many do not get to their end. Return the last outputs of
    those that do, by number. Check that nothing of the others is left."""
    random_numbers = random.Random(seed)
    done: dict[int, RequestOutput] = {}
    aborted: list[str] = []

    async def leave_early(number: int, outputs: int) -> None:
        async for _ in llm.generate(*given[number], str(number)):
            outputs -= 1
            if outputs <= 0:
                break  # the generator is closed when nobody refers to it any more

    async def until_aborted(number: int) -> None:
        async for output in llm.generate(*given[number], str(number)):
            if all(choice.finished() for choice in output.outputs) and output.finished:
                aborted.append(str(output.outputs[-1].finish_reason))

    async def to_the_end(number: int) -> None:
        done[number] = await last_output(llm, *given[number], str(number))

    async def one(number: int) -> None:
        end = random_numbers.choice(ENDS)
        pause = random_numbers.uniform(0.0, 0.3)
        if end == "to the end":
            await to_the_end(number)
        elif end == "break":
            await leave_early(number, random_numbers.randint(1, 4))
        elif end == "abort":
            task = asyncio.create_task(until_aborted(number))
            await asyncio.sleep(pause)
            await llm.abort(str(number))
            await task
        else:
            task = asyncio.create_task(to_the_end(number))
            await asyncio.sleep(0.0 if end == "before the first" else pause)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            done.pop(number, None)

    before = asyncio.all_tasks()
    await asyncio.gather(*(one(number) for number in range(len(given))))
    await until(lambda: llm.get_num_unfinished_requests() == 0)
    await until(lambda: is_idle(llm))
    await until(lambda: asyncio.all_tasks() == before)
    assert set(aborted) <= {"abort", "length"}
    assert len(done) > len(given) / 10
    return done


def is_idle(llm: AsyncLLM) -> bool:
    """Whether the engine reported that it runs nothing and that all blocks are free."""
    load = llm.load
    busy = load.running + load.waiting + load.parked + load.queued_tokens
    return not busy and load.free_blocks == load.total_blocks


async def test_200_generators_with_cancellations_leave_nothing_and_ids_are_llm_s() -> None:
    given = requests(1, lambda number: f"prompt number {number} " * (number % 7 + 1))
    params = [msgspec.structs.replace(each, output_kind=FINAL) for _, each in given]
    expected = answers(sim_llm_engine(), [prompt for prompt, _ in given], params)
    slow = SimConfig(decode_ms=3.0)
    async with sim_llm(max_num_seqs=64, kv_blocks=400, sim=slow) as llm:
        before = asyncio.all_tasks()
        pid = llm.engine_pid
        assert pid is not None
        done = await run_and_cancel(llm, given, seed=2)
        assert llm._streams == {}
        whole_work = sum(len(each.token_ids) for output in expected for each in output.outputs)
        assert llm.load.generated_tokens_total < 0.9 * whole_work, "the cancelled ones ended early"
        assert asyncio.all_tasks() == before
    assert not is_alive(pid)
    for number, output in done.items():
        whole = expected[number]
        assert output.request_id == str(number)
        assert output.prompt_token_ids == whole.prompt_token_ids
        for choice in output.outputs:
            assert choice.token_ids == whole.outputs[choice.index].token_ids
            assert choice.text == whole.outputs[choice.index].text


async def test_a_killed_engine_ends_each_generator_with_an_error_and_takes_no_more() -> None:
    llm = sim_llm(sim=SimConfig(decode_ms=5.0))
    assert (llm.is_running, llm.errored, llm.engine_pid) == (True, False, None)
    waiting = [asyncio.create_task(last_output(llm, f"p{i}", ENDLESS)) for i in range(8)]
    await until(lambda: llm.load.running == 8)
    pid = llm.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    for result in results:
        assert isinstance(result, EngineDeadError)
        assert f"process {pid} ended: killed by signal 9" in str(result)
    assert (llm.is_running, llm.errored, llm.is_stopped) == (False, True, True)
    assert "signal 9" in str(llm.dead_error)
    with pytest.raises(EngineDeadError, match="signal 9"):
        await last_output(llm, "more", ENDLESS)
    with pytest.raises(EngineDeadError, match="signal 9"):
        await llm.check_health()
    await llm.wait_stopped()
    assert llm.get_num_unfinished_requests() == 0


async def test_a_shut_down_engine_ends_its_generators_and_a_second_one_runs() -> None:
    llm = sim_llm()
    waiting = asyncio.create_task(last_output(llm, "a", ENDLESS))
    await until(lambda: llm.get_num_unfinished_requests() == 1)
    pid = llm.engine_pid
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await waiting
    await llm.wait_stopped()
    assert pid is not None
    assert not is_alive(pid)
    never_started = sim_llm()
    never_started.shutdown()
    await never_started.wait_stopped()
    with pytest.raises(EngineDeadError, match="shut down"):
        await never_started.start()


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_sleep_aborts_or_awaits_the_requests_and_later_ones_wait_for_the_wake_up(
    mode: PauseMode,
) -> None:
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True)
    async with sim_llm(sim=SimConfig(decode_ms=5)) as llm:
        undisturbed = (await last_output(llm, "a", params)).outputs[0].token_ids
        running = asyncio.create_task(last_output(llm, "a", params))
        await until(lambda: llm.load.running)
        sleeping = asyncio.create_task(llm.sleep(2, mode))
        await asyncio.sleep(0)
        later = asyncio.create_task(last_output(llm, "a", params))
        await sleeping
        [choice] = (await running).outputs
        assert choice.finish_reason == ("abort" if mode == "abort" else "length")
        assert (choice.token_ids == undisturbed) == (mode == "wait")
        assert await llm.is_sleeping()
        await llm.sleep(1)  # it sleeps already
        await llm.wake_up(["weights"])
        assert await llm.is_sleeping()
        assert not later.done()
        await llm.wake_up()
        assert not await llm.is_sleeping()
        assert (await later).outputs[0].token_ids == undisturbed


async def test_an_engine_that_ends_asleep_ends_the_requests_that_wait_for_its_wake_up() -> None:
    async with sim_llm() as llm:
        for wrong in (llm.sleep(3), llm.sleep(1, "keep"), llm.wake_up(["kv"])):  # type: ignore[arg-type]
            with pytest.raises(SettingsError, match="is unknown"):
                await wrong
        await llm.sleep()
        waiting = asyncio.create_task(last_output(llm, "a", ENDLESS))
        await asyncio.sleep(0)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        for task in (waiting, llm.wake_up()):
            with pytest.raises(EngineDeadError):
                await task


async def test_wrong_requests_raise_in_their_own_generator() -> None:
    async with sim_llm(max_model_len=100) as llm:
        endless = asyncio.create_task(last_output(llm, "a", SamplingParams(max_tokens=90, seed=1)))
        params = SamplingParams(max_tokens=3)
        with pytest.raises(PromptTooLong, match="100 tokens"):
            await last_output(llm, [65] * 100, params)
        with pytest.raises(InvalidRequest, match="token id 259"):
            await last_output(llm, [259], params)
        with pytest.raises(InvalidRequest, match="top_p is 0"):
            await last_output(llm, "a", SamplingParams(top_p=0.0))
        grammar = StructuredOutputsParams(regex="[ab]{4}")
        answer = await last_output(llm, "a", SamplingParams(max_tokens=9, structured=grammar))
        assert set(answer.outputs[0].text) <= {"a", "b"}
        assert len((await endless).outputs[0].token_ids) == 90
        stats = answer.metrics
        assert stats is not None
        assert stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts


async def test_the_time_in_the_queue_is_that_before_the_first_step() -> None:
    async with sim_llm(max_num_seqs=1, sim=SimConfig(decode_ms=2.0)) as llm:
        params = SamplingParams(max_tokens=12, seed=1)
        outputs = await asyncio.gather(*(last_output(llm, f"p{i}", params) for i in range(2)))
    first, second = sorted(
        (output.metrics for output in outputs if output.metrics is not None),
        key=lambda stats: stats.first_token_ts,
    )
    assert first.scheduled_ts - first.queued_ts < second.scheduled_ts - second.queued_ts
    assert second.scheduled_ts - second.queued_ts > 11 * 0.002


async def test_what_cannot_start_says_so() -> None:
    llm = sim_llm(max_num_seqs=0)
    for _ in range(2):
        with pytest.raises(SetupError, match="--max-num-seqs is 0"):
            await last_output(llm, "a", ENDLESS)
    assert llm.errored
    with pytest.raises(TypeError, match="max_num_seq is unknown; did you mean max_num_seqs"):
        sim_llm(max_num_seq=3)
    with pytest.raises(ModelError, match="/no/such: the folder does not exist"):
        AsyncLLM("/no/such")
    with pytest.raises(SettingsError, match="tokenizer_mode is 'slow'"):
        sim_llm(tokenizer_mode="slow")


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "offline.md").read_text()
    [example] = re.findall(r'^```python\n([^`]*engine="sim"[^`]*)^```$', page, re.MULTILINE)
    exec(example, {"__name__": "__main__"})
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"0", "1"}


def test_a_loop_that_ends_ends_the_engine_process() -> None:
    pids = []

    async def use() -> None:
        llm = sim_llm()
        await llm.start()
        pids.append(llm.engine_pid)

    asyncio.run(use())
    [pid] = pids
    assert pid is not None
    assert not is_alive(pid)


@pytest.mark.long
async def test_the_engine_process_ends_with_a_killed_parent() -> None:
    code = """
        import asyncio
        from baton_node import AsyncLLM
        async def main():
            llm = AsyncLLM(engine="sim")
            await llm.start()
            print(llm.engine_pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert is_alive(pid)
        parent.kill()
        await until_gone(pid)


@pytest.mark.long
async def test_200_generators_on_the_torch_engine_give_the_ids_of_llm_generate(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model("qwen3-gqa4")
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_blocks": 200}
    given = requests(3, lambda number: prompt_of(number % 90 + 1, seed=number))
    llm = LLM(folder, **options)
    expected = llm.generate(*zip(*given, strict=True), use_tqdm=False)
    del llm
    for seed in range(3):
        async with AsyncLLM(folder, **options) as asyncllm:
            done = await run_and_cancel(asyncllm, given, seed)
        for number, output in done.items():
            for choice in output.outputs:
                whole = expected[number].outputs[choice.index]
                assert (choice.token_ids, choice.text) == (whole.token_ids, whole.text)
