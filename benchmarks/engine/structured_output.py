"""The cost of a grammar: the demo model's tokens per second with a JSON schema and without.

`--batch` requests (32) of the demo model generate `--tokens` (128) tokens each, without a schema
and with one that no answer ends within. Passes are interleaved and medians compared: the goal is at
least 0.85 of the speed without. Also the time to the first token of a request whose schema is
already compiled, compared with none: the goal is at most 5 ms later. Also the time of a mask, and
of compiling a new schema of 2 KB; `new_schemas` measures its effect on other streams. `--quick`
runs one short pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from baton_cli.models.demo_model import fetch_demo
from baton_engine import LLM, SamplingParams, StructuredOutputsParams
from baton_text.artifacts import read_artifacts
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.grammars import Grammars
from baton_text.tokenizer import Tokenizer
from benchmarks.engine.new_schemas import new_schema
from benchmarks.support.figures import at_least, at_most, spread

PROMPT = "The people who live in this town, each with name, age and trade, are: "
LEAST_SHARE = 0.85
LATER_MS = 5.0


def main() -> None:
    options = parse_options()
    folder = fetch_demo(None, print)
    llm = LLM(folder, threads=options.threads, kv_blocks=2000)
    people = StructuredOutputsParams(json=list_of(PERSON))
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=options.tokens, ignore_eos=True)
    bound = SamplingParams(
        temperature=1.0, seed=1, max_tokens=options.tokens, ignore_eos=True, structured=people
    )
    llm.generate(PROMPT, bound, use_tqdm=False)  # warm: products are packed, the schema is compiled
    speeds: dict[str, list[float]] = {"plain": [], "schema": []}
    firsts: dict[str, list[float]] = {"plain": [], "schema": []}
    for number in range(options.passes):
        for name, params in (("plain", plain), ("schema", bound)):
            prompts = [f"{number}{name}{place}. {PROMPT}" for place in range(options.batch)]
            speeds[name].append(tokens_per_s(llm, prompts, params))
            one = SamplingParams(seed=1, max_tokens=1, structured=params.structured)
            ask = partial(llm.generate, f"{number}{name} {PROMPT}", one)
            firsts[name].append(timed(ask) * 1e3)
    verdict = at_least(speeds["schema"], speeds["plain"], LEAST_SHARE)
    print(
        f"tokens/s, batch {options.batch}: {spread(speeds['plain'], 0)} plain, "
        f"{spread(speeds['schema'], 0)} with a schema {verdict.text}"
    )
    later = [with_ms - ms for with_ms, ms in zip(firsts["schema"], firsts["plain"], strict=True)]
    print(f"first token: {spread(later, 1)} ms later {at_most(later, LATER_MS, 'ms', 0).text}")
    host_figures(Tokenizer.from_artifacts(read_artifacts(folder)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one pass of 4 requests and 16 tokens")
    add("--batch", type=int, default=32, help="requests at a time (default 32)")
    add("--tokens", type=int, default=128, help="tokens of each request (default 128)")
    add("--passes", type=int, default=3, help="passes of each side (default 3)")
    add("--threads", type=int, default=2, help="threads of the engine (default 2)")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.tokens, options.passes = 4, 16, 1
    return options


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "trade": {"enum": ["baker", "smith", "weaver"]},
    },
    "required": ["name", "age", "trade"],
    "additionalProperties": False,
}


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1000}


def tokens_per_s(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    taken = time.perf_counter() - began
    return sum(len(choice.token_ids) for each in outputs for choice in each.outputs) / taken


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def host_figures(tokenizer: Tokenizer) -> None:
    """Per token and per schema, without an engine."""
    grammars = Grammars(tokenizer)
    matcher = grammars.matcher(grammar_of("json", list_of(PERSON)))
    person = '{"name": "Ann of the old mill", "age": 31, "trade": "baker"}'
    masks = []
    for id in tokenizer.encode(f"[{', '.join([person] * 8)}", add_special_tokens=False):
        masks.append(timed(matcher.mask))
        assert matcher.accept([id])
    print(f"a mask: {statistics.mean(masks) * 1e6:.0f} us on average, {max(masks) * 1e6:.0f} most")
    grammars_of_2_kb = [grammar_of("json", new_schema(serial)) for serial in range(5)]
    compiled = [timed(partial(grammars.check, each)) for each in grammars_of_2_kb]
    print(f"a new schema of 2 KB: {statistics.median(compiled) * 1e3:.1f} ms to compile")


if __name__ == "__main__":
    main()
