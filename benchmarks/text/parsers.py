"""The time to separate reasoning, content and calls, for each tool parser.

    python -m benchmarks.text.parsers [--passes 9]

Claim: each parser takes under 10 us per delta of 4 characters, at the median, on an answer with
reasoning, text and two calls in the family's form (text alone if it has no form). If
calls are allowed only at the beginning, the answer has no text. The time is linear: a text of
`--long` characters (100,000) that begins as a call and does not end takes under 10 us per delta
too. Garbage collection is on. Exit 1 if a goal is missed; `--quick` runs one pass.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from baton_text.parsers.parser import ArgumentForm, ToolParser, Tools
from baton_text.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, reader
from benchmarks.support.figures import Verdict, at_most, exit_code, machine, spread

GOAL_US = 10.0
DELTA = 4  # characters
REPEATS = 20  # of an answer in one pass
TOOLS: Tools = {"weather": {"type": "object"}}
ARGUMENTS = '{"city": "Paris", "days": 3, "more": {"units": ["metric", "imperial"], "note": "a b"}}'
REASONING = "The user asks for the weather in two places, so two calls are needed. " * 4
TEXT = "Let me look at the weather in both of these places, and then compare them for you. " * 3


def answer_of(parser: ToolParser) -> str:
    """Text and two calls, or what the form has of them; without reasoning."""
    form = parser.form
    if form is None:
        return TEXT
    arguments = ARGUMENTS if form.arguments is None else one_by_one(form.arguments)
    one = f"{form.before_name}weather{form.before_arguments}{arguments}{form.after_arguments}"
    calls = f"{form.open}{one}"
    if form.between is not None:
        calls += f"{form.between}{one}"
    calls += form.close
    return calls if calls.startswith(("{", "[{", "[w")) else f"{TEXT}\n{calls}"


def one_by_one(form: ArgumentForm) -> str:
    """ARGUMENTS as a family writes them that does not write a JSON object."""
    return form.between.join(
        f"{form.before_key}{key}{form.after_key}"
        f"{value if form.plain_strings and isinstance(value, str) else json.dumps(value)}"
        f"{form.after_value}"
        for key, value in json.loads(ARGUMENTS).items()
    )


def endless(parser: ToolParser, length: int) -> str:
    """An answer whose last argument is cut and goes on, so that it never ends."""
    begun = answer_of(parser)
    begun = begun[: begun.rindex("a b")] if "a b" in begun else begun
    return begun + "word " * ((length - len(begun)) // 5)


def us_per_delta(parser: ToolParser, text: str, repeats: int) -> float:
    deltas = [text[at : at + DELTA] for at in range(0, len(text), DELTA)]
    began = time.perf_counter()
    for _ in range(repeats):
        one = reader(TOOLS, parser, REASONING_PARSERS["qwen3"])
        for delta in deltas:
            one.push(delta)
        one.finish()
    return 1e6 * (time.perf_counter() - began) / (repeats * len(deltas))


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--passes", type=int, default=9)
    options.add_argument("--long", type=int, default=100_000, help="characters")
    options.add_argument("--quick", action="store_true")
    args = options.parse_args(argv)
    passes = 1 if args.quick else args.passes
    print(machine())
    verdicts: list[Verdict] = []
    for name, parser in TOOL_PARSERS.items():
        reasoning = "" if parser.reads_reasoning else f"<think>\n{REASONING}\n</think>\n\n"
        answer = f"{reasoning}{answer_of(parser)}"
        long = reasoning + endless(parser, args.long)
        usual = [us_per_delta(parser, answer, REPEATS) for _ in range(passes)]
        longest = [us_per_delta(parser, long, 1) for _ in range(passes)]
        for kind, found in ("answer", usual), ("long", longest):
            verdicts.append(at_most(found, GOAL_US, "us"))
            print(f"{name:<14} {kind:<7} {spread(found)} us per delta  {verdicts[-1].text}")
    return exit_code(verdicts, quick=args.quick)


if __name__ == "__main__":
    sys.exit(main())
