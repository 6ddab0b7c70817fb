"""Our engine on a CPU against transformers' generate, in the same process and run.

Workload: 16 prompts of 64-256 random ids, 64 new tokens each, greedy, EOS ignored, fp32, on a
random 116M-parameter model of Qwen3's shape. Passes of the three contenders are interleaved, so
that a slow minute of the machine hits all; medians are compared. Prints a table, the ratios and
the machine's matrix speed. `--quick` runs one short pass of each on a tiny model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton_engine.core import EngineCore
from baton_engine.torch_engine import build_torch
from baton_engine.torch_settings import TorchSettings
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams

VOCAB = 8192
STEP_LIMIT = 1_000_000


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    new_tokens: int

    @property
    def output_tokens(self) -> int:
        return len(self.prompts) * self.new_tokens


Contender = Callable[[Workload], list[list[int]]]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    size = (256, 4, 768, 8, 2, 32) if options.quick else (768, 16, 2304, 12, 4, 64)
    new_tokens = min(options.new_tokens, 8) if options.quick else options.new_tokens
    passes = 1 if options.quick else options.passes
    draw = random.Random(options.seed)
    lengths = [draw.randint(64, 256) for _ in range(options.prompts)]
    workload = Workload([[draw.randrange(VOCAB) for _ in range(n)] for n in lengths], new_tokens)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        folder = Path(name) / "model"
        parameters = save_model(folder, *size)
        print(
            f"{parameters / 1e6:.0f}M parameters, fp32, {options.threads} threads; "
            f"{len(lengths)} prompts, {sum(lengths)} prompt tokens, {new_tokens} new tokens each; "
            f"{passes} interleaved passes"
        )
        print(f"matrix product 256x2304x4608: {matrix_gflops():.0f} GFLOP/s")
        contenders = make_contenders(folder, options)
        report(contenders, workload, passes)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny model, one pass of 8 tokens")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--passes", type=int, default=3, help="passes per contender (default 3)")
    parser.add_argument("--prompts", type=int, default=16, help="number of prompts (default 16)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per prompt (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts (default 0)")
    parser.add_argument(
        "--max-batched-tokens", type=int, help="our engine's token budget (default: its own)"
    )
    return parser.parse_args()


def save_model(
    folder: Path, hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, head_dim: int
) -> int:
    """Write the random model; its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.08, generator=noise)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_contenders(folder: Path, options: argparse.Namespace) -> dict[str, Contender]:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    ours = build_torch(
        TorchSettings(
            model=folder,
            dtype="float32",
            threads=options.threads,
            max_batched_tokens=options.max_batched_tokens,
        )
    )
    return {
        "transformers, one by one": lambda work: [
            row for prompt in work.prompts for row in generate(theirs, [prompt], work.new_tokens)
        ],
        "transformers, padded batch": lambda work: generate(theirs, work.prompts, work.new_tokens),
        "baton": lambda work: run_ours(ours, work),
    }


def generate(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Greedy ids of transformers, prompts padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return [[int(id) for id in row] for row in found[:, width:].tolist()]


def run_ours(engine: EngineCore, work: Workload) -> list[list[int]]:
    """Greedy ids of our engine, and a cold prefix cache in each pass: a new salt names the
    blocks anew."""
    params = SamplingParams(temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True)
    salt = str(engine.load().engine_steps_total)
    for index, prompt in enumerate(work.prompts):
        engine.submit(
            Request(
                id=RequestId(str(index)),
                attempt=0,
                prompt_ids=tuple(prompt),
                params=params,
                outputs=((),),
                salt=salt,
            )
        )
    found: list[list[int]] = [[] for _ in work.prompts]
    for _ in range(STEP_LIMIT):
        if not engine.has_work():
            return found
        for token in engine.step().tokens:
            found[int(token.request)].append(token.id)
    raise RuntimeError(f"not finished after {STEP_LIMIT} steps")


def matrix_gflops() -> float:
    """Speed of a product of the size a prefill step has."""
    a, b = torch.randn(256, 2304), torch.randn(4608, 2304)
    times = [seconds(lambda: torch.nn.functional.linear(a, b)) for _ in range(20)]
    return 2 * 256 * 2304 * 4608 / statistics.median(times) / 1e9


def seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def report(contenders: dict[str, Contender], work: Workload, passes: int) -> None:
    warm_up = Workload([prompt[:64] for prompt in work.prompts], 2)
    for contender in contenders.values():
        contender(warm_up)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    ids: dict[str, list[list[int]]] = {}
    for _ in range(passes):
        for name, contender in contenders.items():
            begin = time.perf_counter()
            ids[name] = contender(work)
            times[name].append(time.perf_counter() - begin)
    print(f"{'':28} {'median s':>9} {'tok/s':>7} {'x one by one':>13}   passes in s; equal rows")
    base_name = next(iter(contenders))
    base = statistics.median(times[base_name])
    for name in contenders:
        middle = statistics.median(times[name])
        equal = sum(a == b for a, b in zip(ids[name], ids[base_name], strict=True))
        each = " ".join(f"{value:.2f}" for value in times[name])
        print(
            f"{name:28} {middle:9.2f} {work.output_tokens / middle:7.1f} {base / middle:13.2f}   "
            f"{each}; {equal}/{len(work.prompts)}"
        )


if __name__ == "__main__":
    main()
