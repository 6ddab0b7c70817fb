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

    log_level: LogLevel = flag("warning", "how much to log on stderr")
    model: str = flag("", "a Hugging Face folder, or a hub id (HF_ENDPOINT is honoured)")
    prompt: str = flag("", "the text to continue", metavar="TEXT")
    prompts_file: str = flag(
        "",
        "a file with one prompt per line, instead of --prompt",
        metavar="FILE",
        excludes="prompt",
    )
    chat: bool = flag(False, "treat each prompt as a user's message in the chat template")
    json: bool = flag(False, "one JSON object per prompt")
    n: int = flag(1, "answers per prompt", least=1)
    temperature: float | None = flag(
        None, "0 is greedy (default: the model's own, else 1)", least=0
    )
    top_k: int | None = flag(None, "keep the likeliest N tokens; -1 is off", least=-1)
    top_p: float | None = flag(None, "keep tokens up to this share of probability", least=0, most=1)
    min_p: float | None = flag(None, "keep tokens of this share of the best one's", least=0, most=1)
    seed: int | None = flag(
        None, "keys the random numbers: the same prompts and seed give the same tokens"
    )
    max_tokens: int = flag(128, "longest answer in tokens", least=1)
    min_tokens: int = flag(0, "shortest answer in tokens", least=0)
    stop: tuple[str, ...] = flag((), "texts that end an answer", metavar="TEXT,...")
    ignore_eos: bool = flag(False, "go on past the model's end-of-text token")
    logprobs: int | None = flag(
        None, "log-probabilities of the N likeliest tokens", least=0, most=20
    )
