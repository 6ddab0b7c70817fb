"""Flags of `baton generate`: prompts, engine and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.logs import LogLevel
from baton_cli.options.records import CommonOptions
from baton_engine.config.engine_config import EngineConfig
from baton_protocol.options import option


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(CommonOptions, EngineConfig):
    TITLE = "generate"

    log_level: LogLevel = option("warning", "log level on stderr")
    model: str = option(
        "", "Hugging Face folder, GGUF file, or hub id (HF_ENDPOINT selects the hub)"
    )
    prompt: str = option("", "text to continue", metavar="TEXT")
    prompts_file: str = option(
        "",
        "file with one prompt per line, instead of --prompt",
        metavar="FILE",
        excludes="prompt",
    )
    chat: bool = option(False, "treat each prompt as a user's message in the chat template")
    json: bool = option(False, "one JSON object per prompt")
    n: int = option(1, "answers per prompt", least=1)
    temperature: float | None = option(
        None, "sampling temperature; 0: greedy (default: the model's own, else 1)", least=0
    )
    top_k: int | None = option(None, "keep the N likeliest tokens; -1: off", least=-1)
    top_p: float | None = option(
        None, "keep the likeliest tokens up to this total probability", least=0, most=1
    )
    min_p: float | None = option(
        None, "keep tokens with at least this share of the best one's probability", least=0, most=1
    )
    seed: int | None = option(
        None, "seed of the sampling: the same prompts and seed give the same tokens"
    )
    max_tokens: int = option(128, "maximum length of an answer in tokens", least=1)
    min_tokens: int = option(0, "minimum length of an answer in tokens", least=0)
    stop: tuple[str, ...] = option((), "texts that end an answer", metavar="TEXT,...")
    ignore_eos: bool = option(False, "continue after the model's end-of-text token")
    logprobs: int | None = option(
        None, "log-probabilities of the N likeliest tokens", least=0, most=20
    )
