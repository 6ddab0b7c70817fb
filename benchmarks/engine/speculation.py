"""Drafts on a CPU: the demo model with and without them, and beside vLLM's n-gram drafts.

    python -m benchmarks.engine.speculation [--quick] [--threads 2] [--work copy draft_model]

- `copy`: answers that quote a passage of the prompt, or repeat it with a name changed, greedy; one
  request at a time and eight together. The passages are prose of `held_out.txt`. Goals: with the
  better of n-gram and suffix drafts 1.8 times as fast as without with one request, 1.2 times with
  eight, and as fast as vLLM's CPU build with n-gram drafts, if `make peers` has installed it.
- `random`: answers at temperature 1 to random ids, where there is nothing to guess; 1, 8 and 32
  requests. Goal: with drafts at least 0.97 times as fast as without.
- `json`: answers bound to a schema with long names of keys. Goal: with the tokens that the grammar
  forces as drafts 1.3 times as fast as without.
- `draft_model`: greedy answers to questions, one request at a time. The demo model's `int4` form
  drafts for it, or its first third of layers, which guesses nothing right. Goal: at least 0.97
  times as fast as without, whether drafts pay or not.

The KV of the prompts is cached before the first pass, so a pass is nearly all decoding. Ids with
drafts must be those without. All engines are in memory at once and take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from baton_cli.models.demo_model import fetch_demo
from baton_engine import LLM, SamplingParams, StructuredOutputsParams
from baton_protocol.policies import DType
from baton_text.artifacts import read_artifacts
from baton_text.tokenizer import Tokenizer
from benchmarks.support.engine.cpu_engines import Ids, Vllm, vllm_takes_part
from benchmarks.support.engine.cpu_workloads import Workload
from benchmarks.support.engine.first_layers import first_layers
from benchmarks.support.engine.held_out_text import windows
from benchmarks.support.figures import Verdict, at_least, exit_code, machine, rotated, spread

DTYPE: DType = "bfloat16"
PLAIN = "no drafts"
NGRAM = {"method": "ngram", "num_speculative_tokens": 8}
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "ngram": NGRAM,
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "grammar": {"method": "grammar", "num_speculative_tokens": 16},
    "int4 form": {"method": "draft_model", "quantization": "int4", "num_speculative_tokens": 4},
    "first third": {"method": "draft_model", "num_speculative_tokens": 4},
}
VLLM_NGRAM = {**NGRAM, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
# One name in the passages, and what an edit calls it. Then the names of the JSON object's keys.
OLD, NEW = "node", "machine"
KEYS = (
    "temperature_of_the_outside_air_in_celsius",
    "relative_humidity_of_the_outside_air_in_percent",
    "average_speed_of_the_wind_in_kilometres_per_hour",
    "expected_amount_of_rain_in_millimetres",
)
PASSAGE, GIVEN = 200, 24  # tokens of a passage, and how many of them the answer begins with
RANDOM_PROMPT = 64
KV_TOKENS = 12 * 1024


@dataclass(frozen=True)
class Work:
    """Prompts that run `batch` at a time, and what their answers may cost."""

    name: str
    prompts: Ids
    batch: int
    params: SamplingParams
    goal: float
    sides: Sequence[str]  # of CONFIGS; the goal is that of the fastest if `best`, else of each
    best: bool = False


class Side(Protocol):
    name: str

    def run(self, work: Work) -> tuple[float, Ids]:
        """Seconds and ids of one pass."""
        ...


class Baton:
    """Also notes how many drafts of the last pass were made and accepted."""

    def __init__(self, name: str, folder: Path, threads: int, drafting: Path | None = None) -> None:
        """`drafting` is the folder of the draft model, by default the same."""
        self.name, config = name, CONFIGS.get(name)
        if config is not None and config["method"] == "draft_model":
            config = {**config, "model": str(folder if drafting is None else drafting)}
        self._llm = LLM(
            folder,
            dtype=DTYPE,
            threads=threads,
            kv_blocks=KV_TOKENS // 16,
            block_size=16,
            speculative_config=None if config is None else json.dumps(config),
        )
        self.drafted = self.accepted = 0

    def run(self, work: Work) -> tuple[float, Ids]:
        before, ids = self._llm.engine.load(), Ids()
        began = time.perf_counter()
        for first in range(0, len(work.prompts), work.batch):
            together = work.prompts[first : first + work.batch]
            outputs = self._llm.generate(together, work.params, use_tqdm=False)
            ids += [output.outputs[0].token_ids for output in outputs]
        passed, after = time.perf_counter() - began, self._llm.engine.load()
        self.drafted = after.drafted_tokens_total - before.drafted_tokens_total
        self.accepted = after.accepted_drafts_total - before.accepted_drafts_total
        return passed, ids


class VllmNgram:
    def __init__(self, folder: Path, threads: int) -> None:
        self._side = Vllm(folder, DTYPE, threads, {"speculative_config": VLLM_NGRAM})
        self.name = f"{self._side.name}, ngram"

    def run(self, work: Work) -> tuple[float, Ids]:
        passed, ids = 0.0, Ids()
        for first in range(0, len(work.prompts), work.batch):
            together = Workload(work.prompts[first : first + work.batch], work.params.max_tokens)
            seconds, found = self._side.run(together, keep_cache=True)
            passed, ids = passed + seconds, ids + found
        return passed, ids

    def close(self) -> None:
        self._side.close()


def main() -> int:
    options = parse_options()
    folder = fetch_demo(None, print)
    print(f"{machine()}; {options.threads} threads, {DTYPE}, {options.passes} passes")
    work = [each for name in options.work for each in MAKERS[name](folder, options.tokens)]
    work = [each for each in work if each.batch in options.batch]
    verdicts: list[Verdict] = []
    with ExitStack() as stack:
        names = dict.fromkeys([PLAIN, *(name for each in work for name in each.sides)])
        ours = {name: stack.enter_context(side(name, folder, options.threads)) for name in names}
        vllm = None
        if "copy" in options.work and not options.quick and vllm_takes_part(asked=False):
            vllm = VllmNgram(folder, options.threads)
            stack.callback(vllm.close)
        for each in work:
            sides = [ours[name] for name in (PLAIN, *each.sides)]
            rival = vllm if each.name == "copy" else None
            verdicts += compare(each, sides, rival, options.passes)
    return exit_code(verdicts, quick=options.quick)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one pass of 16 tokens, no batch of 32, no vLLM")
    add("--work", nargs="+", choices=list(MAKERS), default=list(MAKERS), help="(default all)")
    add("--batch", type=int, nargs="+", default=[1, 8, 32], help="(default 1 8 32)")
    add("--tokens", type=int, default=96, help="tokens of each answer (default 96)")
    add("--passes", type=int, default=3, help="passes of each side (default 3)")
    add("--threads", type=int, default=2, help="threads of each side (default 2)")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.passes, options.batch = 16, 1, [1, 8]
    return options


@contextmanager
def side(name: str, folder: Path, threads: int) -> Iterator[Baton]:
    if name != "first third":
        yield Baton(name, folder, threads)
        return
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    with TemporaryDirectory(prefix="baton-bench-") as work:
        cut = first_layers(folder, layers // 3, Path(work) / "first")
        yield Baton(name, folder, threads, cut)


def copies(folder: Path, tokens: int) -> list[Work]:
    tokenizer = Tokenizer.from_artifacts(read_artifacts(folder))
    texts = [tokenizer.decode(list(window)) for window in windows(tokenizer, 8, PASSAGE)]
    prompts = [
        copy_prompt(tokenizer, text, edit=bool(place % 2)) for place, text in enumerate(texts)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [
        Work("copy", prompts[:4], 1, params, 1.8, ("ngram", "suffix"), best=True),
        Work("copy", prompts, 8, params, 1.2, ("ngram", "suffix"), best=True),
    ]


def copy_prompt(tokenizer: Tokenizer, text: str, *, edit: bool) -> list[int]:
    """A passage, and the first tokens of an answer that repeats it."""
    wish = f"with {NEW} instead of {OLD}" if edit else "word for word"
    answer = text.replace(OLD, NEW) if edit else text
    given = tokenizer.decode(tokenizer.encode(answer)[:GIVEN])
    return tokenizer.encode(f"A text:\n\n{text}\n\nThe same text, {wish}:\n\n{given}")


def randoms(folder: Path, tokens: int) -> list[Work]:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
    return [
        Work(
            "random",
            [[draw.randrange(vocabulary) for _ in range(RANDOM_PROMPT)] for _ in range(count)],
            batch,
            params,
            0.97,
            ("ngram", "suffix"),
        )
        for count, batch in ((2, 1), (8, 8), (32, 32))
    ]


def schemas(folder: Path, tokens: int) -> list[Work]:
    tokenizer = Tokenizer.from_artifacts(read_artifacts(folder))
    schema = {
        "type": "object",
        "properties": {key: {"type": "integer", "minimum": 0, "maximum": 99} for key in KEYS},
        "required": list(KEYS),
        "additionalProperties": False,
    }
    params = SamplingParams(
        temperature=0.0, max_tokens=4 * tokens, structured=StructuredOutputsParams(json=schema)
    )
    prompts = [
        tokenizer.encode(f"The weather in {town} today, as JSON:\n")
        for town in ("Berne", "Oslo", "Porto", "Riga", "Lyon", "Bonn", "Turin", "Gent")
    ]
    return [
        Work("json", prompts[:4], 1, params, 1.3, ("grammar",)),
        Work("json", prompts, 8, params, 1.3, ("grammar",)),
    ]


def questions(folder: Path, tokens: int) -> list[Work]:
    tokenizer = Tokenizer.from_artifacts(read_artifacts(folder))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [
        tokenizer.encode(f"Question: What is {topic}?\nAnswer:")
        for topic in ("rain", "a volcano", "chess", "the moon")
    ]
    return [Work("draft_model", prompts, 1, params, 0.97, ("int4 form", "first third"))]


MAKERS: Mapping[str, Callable[[Path, int], list[Work]]] = {
    "copy": copies,
    "random": randoms,
    "json": schemas,
    "draft_model": questions,
}


def compare(
    work: Work, ours: Sequence[Baton], rival: VllmNgram | None, passes: int
) -> list[Verdict]:
    """Print a line for each side. The first side makes no drafts."""
    sides: list[Side] = [*ours, *([] if rival is None else [rival])]
    speeds: dict[str, list[float]] = {side.name: [] for side in sides}
    ids = {side.name: side.run(work)[1] for side in sides}  # also caches the prompts
    tokens = sum(map(len, ids[PLAIN]))
    for number in range(passes):
        for side in rotated(sides, number):
            passed, found = side.run(work)
            assert found == ids[side.name], f"{side.name} gives other ids in another pass"
            speeds[side.name].append(tokens / passed)
    print(f"\n{work.name}, {work.batch} together: {len(work.prompts)} answers, {tokens} tokens")
    verdicts = list[Verdict]()
    fastest = max(work.sides, key=lambda name: statistics.median(speeds[name]))
    for side in sides:
        judged = side in ours[1:] and (not work.best or side.name == fastest)
        verdict = at_least(speeds[side.name], speeds[PLAIN], work.goal) if judged else None
        same = sum(a == b for a, b in zip(ids[side.name], ids[PLAIN], strict=True))
        made = f"{side.accepted}/{side.drafted} drafts right" if isinstance(side, Baton) else ""
        times = f"{statistics.median(speeds[side.name]) / statistics.median(speeds[PLAIN]):5.2f}x"
        print(
            f"  {side.name:24} tokens/s {spread(speeds[side.name], 0):18} same ids"
            f" {same}/{len(work.prompts)}  {made:24} {verdict.text if verdict else times}"
        )
        if verdict is not None:
            verdicts.append(verdict)
        if side in ours and same < len(work.prompts):
            raise SystemExit(f"{side.name} gives other ids than {PLAIN}")
    if rival is not None:
        beside = at_least(speeds[fastest], speeds[rival.name], 1.0)
        print(f"  {fastest} beside {rival.name}: {beside.text}")
        verdicts.append(beside)
    return verdicts


if __name__ == "__main__":
    raise SystemExit(main())
