"""The workloads of the engine benches: prompts of token ids, and numbers of new tokens.

In: flags and the size of the vocabulary. Out: a Workload, which is the same for equal seeds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from baton_cli.bench.options import (
    DEFAULT_INPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    DEFAULT_PROMPTS,
    LatencyOptions,
    ThroughputOptions,
)
from baton_cli.errors import CommandError, UsageError
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams

# The reference workload of nano-vllm's and mini-sglang's offline bench: its ranges and its totals.
NANO_SEED = 0
NANO_PROMPTS = 256
NANO_LENGTHS = (100, 1024)
NANO_LAST_ID = 10_000
NANO_TEMPERATURE = 0.6
NANO_TOTALS = (142_827, 133_966, 1_024)
# Flags that cannot be combined with --preset.
PRESET_DECIDES = (
    *("dataset_name", "dataset_path", "input_len", "output_len"),
    *("random_range_ratio", "random_prefix_len"),
)


class WorkloadItem(NamedTuple):
    """One prompt and the number of tokens to generate."""

    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests that are submitted at once. Each generates all its tokens: EOS is ignored."""

    name: str
    items: tuple[WorkloadItem, ...]
    temperature: float = 1.0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.new_tokens for item in self.items)

    @property
    def longest_answer(self) -> int:
        """The most new tokens of a prompt: also the fewest steps that the workload can take."""
        return max(item.new_tokens for item in self.items)

    def requests(self, seed: int, salt: str = "") -> list[Request]:
        """Build the engine's requests. A different `salt` gives the same prompts, but separates
        them in the prefix cache."""
        return [
            Request(
                id=RequestId(f"{salt}{index}"),
                attempt=0,
                prompt_ids=item.prompt,
                params=SamplingParams(
                    temperature=self.temperature,
                    seed=seed + index,
                    max_tokens=item.new_tokens,
                    ignore_eos=True,
                ),
                outputs=((),),
                salt=salt,
            )
            for index, item in enumerate(self.items)
        ]


def check_flags(options: ThroughputOptions) -> None:
    """Raise UsageError for combinations in which one flag has no effect."""
    defaults = ThroughputOptions()
    given = [name for name in PRESET_DECIDES if getattr(options, name) != getattr(defaults, name)]
    if options.preset and given:
        raise UsageError(f"give --preset or {_flag(given[0])}, not both")
    if (options.dataset_name == "sharegpt") != bool(options.dataset_path):
        raise UsageError("--dataset-name sharegpt and --dataset-path FILE belong together")
    random_only = [name for name in given if name.startswith("random_") or name == "input_len"]
    if options.dataset_name == "sharegpt" and random_only:
        raise UsageError(f"{_flag(random_only[0])} is for --dataset-name random")
    if options.preset and (options.num_prompts or 0) > NANO_PROMPTS:
        raise UsageError(
            f"--num-prompts {options.num_prompts}: --preset {options.preset} has "
            f"exactly {NANO_PROMPTS} prompts"
        )


def synthetic(options: ThroughputOptions, vocab_size: int) -> Workload:
    """Build the preset's workload, or random prompts."""
    if options.preset:
        return nano_vllm(vocab_size, options.num_prompts or NANO_PROMPTS)
    return random_prompts(
        vocab_size,
        count=options.num_prompts or DEFAULT_PROMPTS,
        input_len=options.input_len or DEFAULT_INPUT_LEN,
        output_len=options.output_len or DEFAULT_OUTPUT_LEN,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
        seed=options.seed,
    )


def batch(options: LatencyOptions, vocab_size: int) -> Workload:
    """Build one batch of prompts of equal length."""
    return random_prompts(
        vocab_size,
        count=options.batch_size,
        input_len=options.input_len,
        output_len=options.output_len,
        seed=options.seed,
    )


def random_prompts(
    vocab_size: int,
    *,
    count: int,
    input_len: int,
    output_len: int,
    seed: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
) -> Workload:
    """Build prompts of uniform random ids after a shared prefix. Lengths are uniform within a
    relative distance of `range_ratio` from the given ones."""
    draw, ids = random.Random(seed), range(vocab_size)

    def length(middle: int) -> int:
        low, high = math.floor(middle * (1 - range_ratio)), math.ceil(middle * (1 + range_ratio))
        return draw.randint(max(1, low), high)

    prefix = draw.choices(ids, k=prefix_len)
    items = [
        WorkloadItem((*prefix, *draw.choices(ids, k=length(input_len))), length(output_len))
        for _ in range(count)
    ]
    return Workload("random", tuple(items))


def nano_vllm(vocab_size: int, count: int = NANO_PROMPTS) -> Workload:
    """Build the first `count` requests of the reference workload. Its draws must keep their order:
    each prompt's length before its ids, and all prompts before the numbers of new tokens."""
    if vocab_size <= NANO_LAST_ID:
        raise CommandError(
            f"--preset nano-vllm draws ids up to {NANO_LAST_ID}; this model has {vocab_size}"
        )
    draw = random.Random(NANO_SEED)
    prompts = [
        tuple(draw.randint(0, NANO_LAST_ID) for _ in range(draw.randint(*NANO_LENGTHS)))
        for _ in range(NANO_PROMPTS)
    ]
    items = tuple(WorkloadItem(prompt, draw.randint(*NANO_LENGTHS)) for prompt in prompts)
    workload = Workload("nano-vllm", items, NANO_TEMPERATURE)
    totals = (workload.prompt_tokens, workload.output_tokens, workload.longest_answer)
    assert totals == NANO_TOTALS, (
        f"drew {totals} instead of {NANO_TOTALS}: the random generator differs from CPython's"
    )
    return Workload(workload.name, items[:count], NANO_TEMPERATURE)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
