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


def batch_limits(config: EngineConfig, default_tokens: int) -> BatchLimits:
    """`default_tokens` is the device's default of --max-batched-tokens. Raises SettingsError if a
    prompt must fit one step and may be longer."""
    mode, wanted = config.performance_mode, config.max_model_len
    tokens, seqs = config.max_batched_tokens, config.max_num_seqs
    if tokens is None:
        tokens = _scaled(default_tokens, mode)
    if seqs is None:
        seqs = _scaled(DEFAULT_SEQS, mode)
    if config.enable_chunked_prefill:
        return BatchLimits(tokens, seqs)
    if wanted is not None and wanted > tokens:
        if config.max_batched_tokens is not None:
            raise SettingsError(
                f"--max-batched-tokens {tokens} is less than --max-model-len {wanted}, and"
                " --no-enable-chunked-prefill computes each prompt in one step; raise the first,"
                " lower the second, or leave out --no-enable-chunked-prefill"
            )
        tokens = wanted
    return BatchLimits(tokens, seqs, longest=tokens)


def _scaled(default: int, mode: PerformanceMode) -> int:
    if mode == "throughput":
        return 2 * default
    return max(1, default // 2) if mode == "interactivity" else default
