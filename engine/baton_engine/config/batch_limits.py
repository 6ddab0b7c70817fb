"""The sizes of a step, from the options and the device's default. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.config.engine_config import EngineConfig, PerformanceMode
from baton_engine.errors import SettingsError

DEFAULT_SEQS = 256


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The most tokens and sequences of a step. `longest` is the most tokens of a sequence if a
    prompt must fit one step; None: no such limit."""

    tokens: int
    seqs: int
    longest: int | None = None


def batch_limits(
    config: EngineConfig, default_tokens: int, *, whole: int | None = None
) -> BatchLimits:
    """`default_tokens` is the device's default of --max-batched-tokens. `whole` is the longest
    prompt of a model that computes each in one step; None: it computes them in pieces, too. Raises
    SettingsError if a prompt must fit one step and may be longer."""
    mode, wanted = config.performance_mode, config.max_model_len
    tokens, seqs = config.max_batched_tokens, config.max_num_seqs
    if tokens is None:
        tokens = max(_scaled(default_tokens, mode), whole or 0)
    if seqs is None:
        seqs = _scaled(DEFAULT_SEQS, mode)
    if config.enable_chunked_prefill and whole is None:
        return BatchLimits(tokens, seqs)
    if wanted is not None and wanted > tokens:
        if config.max_batched_tokens is not None:
            why, more = "an encoder", ""
            if whole is None:
                why = "--no-enable-chunked-prefill"
                more = f", or leave out {why}"
            raise SettingsError(
                f"--max-batched-tokens {tokens} is less than --max-model-len {wanted}, and {why}"
                f" computes each prompt in one step; raise the first, or lower the second{more}"
            )
        tokens = wanted
    return BatchLimits(tokens, seqs, longest=tokens)


def _scaled(default: int, mode: PerformanceMode) -> int:
    if mode == "throughput":
        return 2 * default
    return max(1, default // 2) if mode == "interactivity" else default
