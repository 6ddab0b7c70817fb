"""Embeddings on a CPU: Baton's engine beside vLLM's CPU build (runner pooling) and transformers in
the same run.

64 texts of 128 random ids are embedded together by the model of 116M random parameters of
`benchmarks.engine.cpu`. The passes of all sides are interleaved, none finds a cached prefix, and
medians are compared. Prints texts and tokens per second, Baton's ratio to each side (goal: at
least as fast as vLLM in the same dtype), and the least cosine of a vector with Baton's. vLLM takes
part if `make peers` has installed it. `--quick` runs one pass of 16 texts on a tiny model, without
vLLM.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.vectors import numbers_of
from baton_protocol.ids import RequestId
from baton_protocol.policies import DType
from baton_protocol.pooling import PoolingParams
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from benchmarks.support.engine.cpu_engines import Vllm, vllm_takes_part
from benchmarks.support.engine.cpu_workloads import MID, SEED, TINY, VOCAB, save_model
from benchmarks.support.figures import Verdict, at_least, exit_code, machine, ratio, rotated, spread

RIVALS = ("vllm", "transformers")
DTYPES = ("float32", "bfloat16")
GOAL = 1.0
STEP_LIMIT = 100_000

Ids = list[list[int]]
Vectors = list[list[float]]


class Side(Protocol):
    name: str

    def run(self, prompts: Ids) -> tuple[float, Vectors]:
        """Seconds and vectors of one pass that begins with an empty prefix cache."""
        ...

    def close(self) -> None: ...


class Baton:
    def __init__(self, folder: Path, dtype: DType, threads: int, tokens: int | None) -> None:
        self.name = f"baton, {dtype}"
        self._engine = build_torch(
            TorchSettings(
                model=folder,
                dtype=dtype,
                threads=threads,
                max_batched_tokens=tokens,
                runner="pooling",
            )
        )

    def run(self, prompts: Ids) -> tuple[float, Vectors]:
        self._engine.reset_prefix_cache()
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self._engine.submit(
                Request(
                    id=RequestId(str(index)),
                    attempt=0,
                    prompt_ids=tuple(prompt),
                    params=SamplingParams(),
                    outputs=((),),
                    pooling=PoolingParams(),
                )
            )
        found: Vectors = [[] for _ in prompts]
        for _ in range(STEP_LIMIT):
            if not self._engine.has_work():
                return time.perf_counter() - began, found
            for answer in self._engine.step().complete:
                found[int(answer.request)] = numbers_of(answer.vector)
        raise RuntimeError(f"the engine did not finish within {STEP_LIMIT} steps")

    def close(self) -> None:
        """Nothing of it outlives the process."""


class VllmEmbeds:
    """With as many sequences at once as Baton has."""

    def __init__(self, folder: Path, dtype: DType, threads: int) -> None:
        # vLLM's pooling models need a tokenizer, also for prompts of ids.
        options = {
            "runner": "pooling",
            "max_num_seqs": 256,
            "seed": 0,
            "skip_tokenizer_init": False,
        }
        save_tokenizer(folder)
        self._vllm = Vllm(folder, dtype, threads, options)
        self.name = f"{self._vllm.name}, {dtype}"

    def run(self, prompts: Ids) -> tuple[float, Vectors]:
        answer = self._vllm.ask({"prompts": prompts})
        return float(answer["seconds"]), answer["vectors"]

    def close(self) -> None:
        self._vllm.close()


class Transformers:
    """All texts as one batch; they have one length, so nothing is padded."""

    def __init__(self, folder: Path, dtype: DType) -> None:
        from transformers import AutoModel

        self.name = f"transformers, {dtype}"
        self._model: Any = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype))

    def run(self, prompts: Ids) -> tuple[float, Vectors]:
        began = time.perf_counter()
        with torch.inference_mode():
            hidden_RTD = self._model(torch.tensor(prompts), use_cache=False).last_hidden_state
            vectors_RD = torch.nn.functional.normalize(hidden_RTD[:, -1].float(), dim=-1)
        found: Vectors = vectors_RD.tolist()
        return time.perf_counter() - began, found

    def close(self) -> None:
        """Nothing of it outlives the process."""


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    passes, texts = (1, 16) if options.quick else (options.passes, options.texts)
    draw = random.Random(options.seed)
    prompts = [[draw.randrange(VOCAB) for _ in range(options.tokens)] for _ in range(texts)]
    print(f"{machine()}; {options.threads} threads")
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        folder = Path(name) / "model"
        parameters = save_model(folder, TINY if options.quick else MID)
        print(f"{parameters / 1e6:.0f}M parameters; {texts} texts of {options.tokens} tokens")
        for dtype in options.dtype:
            with ExitStack() as stack:
                sides = make_sides(folder, dtype, options)
                for side in sides:
                    stack.callback(side.close)
                verdicts += compare(sides, prompts, passes)
    return exit_code(verdicts, quick=options.quick)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny model, one pass of 16 texts, no vLLM")
    add("--threads", type=int, default=2, help="threads of each side (default 2)")
    add("--passes", type=int, default=3, help="passes per side (default 3)")
    add("--texts", type=int, default=64, help="texts of a pass (default 64)")
    add("--tokens", type=int, default=128, help="tokens of a text (default 128)")
    add("--seed", type=int, default=SEED, help=f"seed of texts (default {SEED})")
    add("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="(default both)")
    add("--rivals", nargs="*", choices=RIVALS, help="(default all; with --quick not vllm)")
    add("--max-batched-tokens", type=int, help="token budget of Baton's engine (default: its own)")
    return parser.parse_args()


def save_tokenizer(folder: Path) -> None:
    """A word for each id."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    words = {str(token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    fast(tokenizer_object=tokenizer, unk_token="0").save_pretrained(folder)


def make_sides(folder: Path, dtype: DType, options: argparse.Namespace) -> list[Side]:
    """Ours first: the others are compared with it."""
    sides: list[Side] = [Baton(folder, dtype, options.threads, options.max_batched_tokens)]
    rivals = options.rivals
    if rivals is None:
        rivals = [rival for rival in RIVALS if not (options.quick and rival == "vllm")]
    if "vllm" in rivals and vllm_takes_part(asked=options.rivals is not None):
        sides.append(VllmEmbeds(folder, dtype, options.threads))
    if "transformers" in rivals:
        sides.append(Transformers(folder, dtype))
    return sides


def compare(sides: Sequence[Side], prompts: Ids, passes: int) -> list[Verdict]:
    """The verdicts on vLLM."""
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    vectors: dict[str, Vectors] = {}
    for side in sides:
        side.run(prompts[:8])  # kernels are compiled
    for number in range(passes):
        for side in rotated(sides, number):
            seconds, vectors[side.name] = side.run(prompts)
            rates[side.name].append(len(prompts) / seconds)
    ours = sides[0].name
    tokens = len(prompts[0])
    print(f"\n{'':34} {'texts/s':>22} {'tokens/s':>9}   least cosine; ours is")
    verdicts = []
    for side in sides:
        found = rates[side.name]
        middle = sorted(found)[len(found) // 2] * tokens
        line = f"{side.name:34} {spread(found, 1):>22} {middle:9.0f}   "
        if side.name == ours:
            print(line)
            continue
        verdict = at_least(rates[ours], found, GOAL)
        if isinstance(side, VllmEmbeds):
            verdicts.append(verdict)
            said = verdict.text
        else:
            said = f"{ratio(rates[ours], found):5.2f}x"
        print(f"{line}{least_cosine(vectors[ours], vectors[side.name]):.5f}; {said}")
    return verdicts


def least_cosine(ours: Vectors, theirs: Vectors) -> float:
    products_R = (torch.tensor(ours) * torch.tensor(theirs)).sum(1)
    return float(products_R.min())


if __name__ == "__main__":
    raise SystemExit(main())
