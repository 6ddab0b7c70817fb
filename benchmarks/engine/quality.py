"""What rounding of weights and KV costs in quality: the demo model on text that it has not seen.

    python -m benchmarks.engine.quality [--quick] [--threads 2] [--rows int8 ...] [--write]

Each row is an engine that rounds something, beside the same engine with the weights in float32. All
but "bfloat16" compute in float32, so a row shows its own rounding alone.

- perplexity of a text (see `benchmarks.support.engine.held_out_text`);
- equal next tokens: how often the likeliest next token of that text is float32's;
- equal answers: how many of 64 greedy tokens come before the first that is not float32's.

The model is the demo model with its channels shuffled (see `shuffled_channels`): the same function,
but weights that are not already on the grid of a 4-bit file. Weights are rounded to the nearest
code. GPTQ, AWQ and auto-round choose codes with the help of sample text, and lose less in the same
number of bits. A row is one line of ROWS: settings of the engine, or a writer of another folder or
file.

`--write` writes the results, and the table and plot in the documents. With `--rows`, other rows
keep the results that they have.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from baton_cli.models.demo_model import fetch_demo
from baton_engine.config.families import read_config
from baton_engine.llm import LLM
from baton_engine.memory.estimate import quantized_part
from baton_protocol.sampling import SamplingParams
from baton_text.artifacts import read_artifacts
from baton_text.tokenizer import Tokenizer
from benchmarks.engine.experts import cpu
from benchmarks.support.engine.held_out_text import windows
from benchmarks.support.engine.quality_page import (
    RESULTS,
    Quality,
    QualityRow,
    read_results,
    write_pages,
    write_results,
)
from benchmarks.support.engine.shuffled_channels import shuffle_channels
from tests.support.engines.quantized import bitsandbytes, floats
from tests.support.engines.quantized.compressed_tensors import config_of, integers
from tests.support.engines.quantized.floats import Fp8
from tests.support.engines.quantized.gguf_files import FILE, nearest, write_gguf
from tests.support.engines.quantized.integer_groups import LAYOUTS as INTEGER_GROUPS
from tests.support.engines.quantized.layout import Layout
from tests.support.engines.quantized.quantized_models import write_quantized

WINDOW, WINDOWS = 512, 8
PROMPT, NEW_TOKENS = 128, 64
PLAIN = "float32"
BY_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
# A model's folder and a place for a new one -> what the engine loads.
Write = Callable[[Path, Path], Path]


@dataclass(frozen=True)
class Row:
    """An engine. `kind` is the heading under which the documents show it."""

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    write: Write = lambda source, place: source


def checkpoint(layout: Layout) -> Write:
    def write(source: Path, place: Path) -> Path:
        write_quantized(source, place, layout)
        return place

    return write


def _integers(bits: int, group: int | None, **more: Any) -> Layout:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "symmetric": not more.get("shifted", False), **strategy}
    return Layout(config_of("pack-quantized", weights), integers(bits, group, packed=True, **more))


def gguf_file(kind: str) -> Write:
    """A GGUF file with matrices of this type, written as llama.cpp's tool would: the embedding,
    which is the head, has 8 bits, and rows that are not whole blocks have another type."""

    def write(source: Path, place: Path) -> Path:
        place.mkdir()
        write_gguf(source, place / FILE, f"{kind}, embedding in Q8_0", nearest)
        return place / FILE

    return write


W8A8 = Layout(
    config_of("int-quantized", {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, **BY_TOKEN}),
    integers(8, None, packed=False),
)
FP8_BLOCKS = Layout(
    {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    },
    Fp8(outputs=128, inputs=128, scale="weight_scale_inv"),
)
ONLINE, CHECKPOINT, KV = "`--quantization`", "checkpoint", "`--kv-cache-dtype`"
GGUF = "GGUF"
ROWS = (
    Row("bfloat16", "compute", {"dtype": "bfloat16"}),
    Row("int8", ONLINE, {"quantization": "int8"}),
    Row("fp8", ONLINE, {"quantization": "fp8"}),
    Row("int4", ONLINE, {"quantization": "int4"}),
    Row("int8, int8 inputs (W8A8)", CHECKPOINT, write=checkpoint(W8A8)),
    Row("FP8, FP8 inputs", CHECKPOINT, write=checkpoint(floats.LAYOUTS["w8a8 float"])),
    Row("FP8 blocks of 128 x 128, FP8 inputs", CHECKPOINT, write=checkpoint(FP8_BLOCKS)),
    Row("int4, groups of 32 (W4A16)", CHECKPOINT, write=checkpoint(_integers(4, 32))),
    Row("int4, groups of 64 (W4A16)", CHECKPOINT, write=checkpoint(_integers(4, 64))),
    Row("GPTQ int4, groups of 32", CHECKPOINT, write=checkpoint(INTEGER_GROUPS["gptq"])),
    Row("AWQ int4 with zeros, groups of 32", CHECKPOINT, write=checkpoint(INTEGER_GROUPS["awq"])),
    Row(
        "NF4, blocks of 64", CHECKPOINT, write=checkpoint(bitsandbytes.LAYOUTS["bitsandbytes nf4"])
    ),
    Row("NVFP4, groups of 16", CHECKPOINT, write=checkpoint(floats.LAYOUTS["nvfp4"])),
    Row("MXFP4, groups of 32", CHECKPOINT, write=checkpoint(floats.LAYOUTS["mxfp4 packed"])),
    Row("Q8_0", GGUF, write=gguf_file("Q8_0")),
    Row("Q6_K, Q8_0 for rows of 576", GGUF, write=gguf_file("Q6_K")),
    Row("Q4_K, Q5_0 for rows of 576", GGUF, write=gguf_file("Q4_K")),
    Row("Q4_0", GGUF, write=gguf_file("Q4_0")),
    # A store with --store-codec int8 has the numbers of int8.
    Row("KV in int8", KV, {"kv_cache_dtype": "int8"}),
    Row("KV in fp8", KV, {"kv_cache_dtype": "fp8"}),
)
QUICK = ("int8", "int4, groups of 32 (W4A16)")


@dataclass(frozen=True)
class Answers:
    """What an engine says: the log-probability of each token of the text, the likeliest token in
    its place, and the greedy ids after each prompt."""

    logprobs: Sequence[float]
    likeliest: Sequence[int]
    greedy: Sequence[Sequence[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.logprobs))


def ask(model: Path, settings: Mapping[str, Any], text: Sequence[Sequence[int]]) -> Answers:
    """Load the model, score the windows and continue their beginnings."""
    length = max(map(len, text)) + NEW_TOKENS
    llm = LLM(model, **{"dtype": PLAIN, "max_model_len": length, "kv_memory": 1 << 28, **settings})
    scored = llm.generate(text, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    positions = [each for one in scored for each in one.prompt_logprobs or () if each is not None]
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    answers = llm.generate([ids[: min(PROMPT, len(ids))] for ids in text], greedy)
    return Answers(
        [each.sampled.logprob for each in positions],
        [each.top[0].id for each in positions],
        [each.outputs[0].token_ids for each in answers],
    )


def compared(row: Row, bits: float, answers: Answers, plain: Answers) -> QualityRow:
    """`answers` beside those of float32."""
    more = [right - ours for right, ours in zip(plain.logprobs, answers.logprobs, strict=True)]
    equal = [ours == right for ours, right in zip(answers.likeliest, plain.likeliest, strict=True)]
    return QualityRow(
        name=row.name,
        kind=row.kind,
        bits=bits,
        perplexity=answers.perplexity,
        increase=math.expm1(statistics.fmean(more)),
        error=statistics.stdev(more) / math.sqrt(len(more)),
        equal_next=statistics.fmean(equal),
        equal_answer=statistics.fmean(map(equal_prefix, answers.greedy, plain.greedy)),
    )


def equal_prefix(ids: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens come before the first difference."""
    pairs = zip(ids, right, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(right))


def bits_of(model: Path, row: Row) -> float:
    """Bits per weight of the layers that are quantized, with their scales as they are in memory."""
    config = read_config(model, quantization=row.settings.get("quantization", "none"))
    numbers, size = quantized_part(config)
    if numbers:
        return size * 8 / numbers
    return 16.0 if row.settings.get("dtype") == "bfloat16" else 32.0


def measure(
    source: Path, rows: Sequence[Row], text: Sequence[Sequence[int]], threads: int
) -> Quality:
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        model = Path(scratch) / "shuffled"
        shuffle_channels(source, model)
        plain, found = ask(model, {"threads": threads}, text), []
        print(f"{PLAIN:38}  perplexity {plain.perplexity:.3f}", flush=True)
        for number, row in enumerate(rows):
            written = row.write(model, Path(scratch) / str(number))
            answers = ask(written, {"threads": threads, **row.settings}, text)
            found.append(compared(row, bits_of(written, row), answers, plain))
            print(found[-1].line, flush=True)
        return Quality(
            machine=cpu(),
            digest=hashlib.sha256(repr([*text]).encode()).hexdigest()[:12],
            tokens=len(plain.logprobs),
            prompts=len(text),
            perplexity=plain.perplexity,
            rows=tuple(found),
        )


def with_kept(found: Quality) -> Quality:
    """Add the rows of the last results that were not measured now, if they are of the same text."""
    before = read_results() if RESULTS.exists() else found
    if before.digest != found.digest:
        return found
    rows = {row.name: row for row in (*before.rows, *found.rows)}
    ordered = tuple(rows[row.name] for row in ROWS if row.name in rows)
    return msgspec.structs.replace(found, rows=ordered)


def main() -> int:
    options = parse_options()
    source = fetch_demo(None, lambda line: None)
    names = QUICK if options.quick else options.rows
    rows = [row for row in ROWS if row.name in names]
    tokenizer = Tokenizer.from_artifacts(read_artifacts(source, None))
    text = windows(tokenizer, *((2, 48) if options.quick else (WINDOWS, WINDOW)))
    found = measure(source, rows, text, options.threads)
    print(f"text {found.digest}: {found.tokens} tokens, {found.prompts} prompts; {found.machine}")
    if options.write:
        write_results(with_kept(found))
        write_pages(read_results())
    return 0


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, names = parser.add_argument, [row.name for row in ROWS]
    add("--quick", action="store_true", help="two rows, a hundred tokens")
    add("--threads", type=int, default=2, help="threads of the engine (default 2)")
    add("--rows", nargs="+", choices=names, default=names, metavar="ROW", help="some rows of ROWS")
    add("--write", action="store_true", help="write the results and the documents")
    options = parser.parse_args(arguments)
    if options.write and options.quick:
        parser.error("--write needs the whole text: leave out --quick")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
