"""What a client may ask of sampling; the wire form and the engine's own record at once."""

from __future__ import annotations

import msgspec

from baton_protocol.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_CHOICES = 128
# Each choice searches for each stop string with a table as long as the string, and each token is
# compared with each stop id: without bounds one body could stop a node's event loop for minutes.
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling of one request.

    temperature 0 is greedy. top_k -1 (or 0), top_p 1 and min_p 0 are off. `max_tokens` counts every
    generated id, EOS and stop tokens included. `logprobs` is the number of alternatives beside the
    sampled token (0: the sampled token alone), None is off. Noise is keyed by (seed, choice,
    position); the router gives a seed to requests that have none.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def check(self) -> None:
        """Raise InvalidRequest naming the field, the value and the allowed range."""
        _within("n", self.n, 1, MAX_CHOICES)
        _within("temperature", self.temperature, 0.0, 100.0)
        if self.top_k < -1:
            raise InvalidRequest(f"top_k is {self.top_k}; use -1 (off) or more", param="top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p is {self.top_p}; it must be in (0, 1]", param="top_p")
        _within("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens}; at least 1 token", param="max_tokens"
            )
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        if any(not text for text in self.stop):
            raise InvalidRequest("stop holds an empty string", param="stop")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop holds a string of {longest} characters; at most {MAX_STOP_CHARS}",
                param="stop",
            )
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids; at most {MAX_STOP_IDS}",
                param="stop_token_ids",
            )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN fails both comparisons
        raise InvalidRequest(f"{name} is {value}; it must be in [{low}, {high}]", param=name)
