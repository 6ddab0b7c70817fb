"""The requests of `baton bench serve`: prompts, arrival times, JSON bodies.

In: ServeOptions, and a tokenizer for sharegpt or chat. Out: a plan, which is the same for equal
flags. Prompts are token ids: /v1/completions accepts these directly, a chat endpoint gets them
decoded to text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from baton_cli.bench.serve_options import ServeOptions
from baton_cli.bench.sharegpt import sharegpt
from baton_cli.bench.trace import trace
from baton_cli.bench.workload import WorkloadItem, random_prompts
from baton_cli.errors import UsageError
from baton_text.tokenizer import Tokenizer

CHAT = "chat/completions"

Arrivals = Callable[[int], list[float]]


class Planned(NamedTuple):
    """A prompt and its arrival time `at`, in seconds since the run began."""

    at: float
    item: WorkloadItem


def is_chat(options: ServeOptions) -> bool:
    return options.endpoint.rstrip("/").endswith(CHAT)


def is_self_timed(options: ServeOptions) -> bool:
    return options.dataset_name == "trace" and options.self_timed


def check_prompts(options: ServeOptions) -> None:
    """Raise UsageError for flags that contradict each other."""
    name, defaults = options.dataset_name, ServeOptions()
    if (name == "random") == bool(options.dataset_path):
        raise UsageError(
            "--dataset-name sharegpt and trace need --dataset-path FILE, and random takes none"
        )
    random_only = (
        "random_input_len",
        "random_output_len",
        "random_range_ratio",
        "random_prefix_len",
    )
    for field in random_only:
        if name != "random" and getattr(options, field) != getattr(defaults, field):
            raise UsageError(f"--{field.replace('_', '-')} is for --dataset-name random")
    why = "sharegpt needs it to count tokens" if name == "sharegpt" else "chat messages are text"
    if not options.tokenizer and (name == "sharegpt" or is_chat(options)):
        raise UsageError(f"--tokenizer is missing: {why}; give a model folder, or bytes for sim")


def plan(
    options: ServeOptions, tokenizer: Tokenizer | None, draw_arrivals: Arrivals
) -> list[Planned]:
    """Return at most --num-prompts requests in order of arrival. `draw_arrivals` makes their times,
    unless a trace brings its own. Raise CommandError for an unusable file."""
    path = Path(options.dataset_path).expanduser()
    times: list[float] | None = None
    if options.dataset_name == "trace":
        workload, trace_times = trace(
            path,
            count=options.num_prompts,
            vocab_size=options.vocab_size,
            output_len=options.output_len,
            seed=options.seed,
        )
        times = trace_times if is_self_timed(options) else None
    elif options.dataset_name == "sharegpt":
        assert tokenizer is not None, "check_prompts requires a tokenizer"
        workload = sharegpt(
            path,
            tokenizer,
            count=options.num_prompts,
            output_len=options.output_len,
            seed=options.seed,
        )
    else:
        workload = random_prompts(
            options.vocab_size,
            count=options.num_prompts,
            input_len=options.random_input_len,
            output_len=options.output_len or options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
            seed=options.seed,
        )
    items = workload.items
    return [Planned(*pair) for pair in zip(times or draw_arrivals(len(items)), items, strict=True)]


class Speaker:
    """Encodes the JSON bodies of one run."""

    def __init__(self, options: ServeOptions, model: str, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer if is_chat(options) else None
        self._common: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.temperature is not None:
            self._common["temperature"] = options.temperature
        if options.ignore_eos:
            self._common["ignore_eos"] = True
        if options.return_token_ids:
            self._common["return_token_ids"] = True

    def body(self, item: WorkloadItem) -> bytes:
        body = {**self._common, **self._prompt(item)}
        return msgspec.json.encode(body)

    def _prompt(self, item: WorkloadItem) -> dict[str, Any]:
        if self._tokenizer is None:
            return {"prompt": item.prompt, "max_tokens": item.new_tokens}
        text = self._tokenizer.decode(item.prompt)
        return {
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": item.new_tokens,
        }
