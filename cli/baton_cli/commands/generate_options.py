"""Flags of `baton generate`: prompts, engine and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.logs import LogLevel
from baton_cli.options.flag import flag
from baton_cli.options.records import CommonOptions
from baton_engine.config.engine_config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(CommonOptions, EngineConfig):
    TITLE = "generate"

    log_level: LogLevel = flag("warning", "log level on stderr")
    model: str = flag("", "Hugging Face folder, or hub id (HF_ENDPOINT selects the hub)")
    prompt: str = flag("", "text to continue", metavar="TEXT")
    prompts_file: str = flag(
        "",
        "file with one prompt per line, instead of --prompt",
        metavar="FILE",
        excludes="prompt",
    )
    chat: bool = flag(False, "treat each prompt as a user's message in the chat template")
    json: bool = flag(False, "one JSON object per prompt")
    n: int = flag(1, "answers per prompt", least=1)
    temperature: float | None = flag(
        None, "sampling temperature; 0: greedy (default: the model's own, else 1)", least=0
    )
    top_k: int | None = flag(None, "keep the N likeliest tokens; -1: off", least=-1)
    top_p: float | None = flag(
        None, "keep the likeliest tokens up to this total probability", least=0, most=1
    )
    min_p: float | None = flag(
        None, "keep tokens with at least this share of the best one's probability", least=0, most=1
    )
    seed: int | None = flag(
        None, "seed of the sampling: the same prompts and seed give the same tokens"
    )
    max_tokens: int = flag(128, "maximum length of an answer in tokens", least=1)
    min_tokens: int = flag(0, "minimum length of an answer in tokens", least=0)
    stop: tuple[str, ...] = flag((), "texts that end an answer", metavar="TEXT,...")
    ignore_eos: bool = flag(False, "continue after the model's end-of-text token")
    logprobs: int | None = flag(
        None, "log-probabilities of the N likeliest tokens", least=0, most=20
    )
