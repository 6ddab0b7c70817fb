"""What a client may ask of sampling; the wire form and the engine's own record at once."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from baton_protocol.errors import InvalidRequest, exact

# How a choice ends: by an EOS or stop id, a stop string or the end of its grammar; or by its limit.
FinishReason = Literal["stop", "length"]
# When beam search ends, see SamplingParams.
EarlyStopping = bool | Literal["never"]
MAX_LOGPROBS = 20  # the default of --max-logprobs
ALL_LOGPROBS = -1  # as many as the vocabulary has
MOST_LOGPROBS = 1 << 20  # no vocabulary has more ids
MAX_LOGPROB_IDS = 128  # of logprob_token_ids
MAX_CHOICES = 128
MAX_TEMPERATURE = 100.0
# Each choice searches for each stop string with a table as long as the string, and each token is
# compared with each stop id: without bounds one body could stop a node's event loop for minutes.
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
# The log-probabilities of a prompt, of a token's choices or of a beam search's answers are one
# message: about 60 bytes and 1 us each, in each process.
MAX_PROMPT_CANDIDATES = 200_000
MAX_BIASED = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_IDS = 64
MAX_BAD_IDS = 8192  # of all bad words: they travel with each prompt of a call
BIAS_RANGE = 100.0
PENALTY_RANGE = 2.0
# Far below, a penalty is 0 in float32, and 0 times the minus infinity of a banned id is no number.
REPETITION_RANGE = (0.01, 10.0)
LENGTH_PENALTY_RANGE = 16.0  # a power of the answer's length, which must fit a float


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer's text must match: the text of a grammar, see `baton_text.grammars`. The
    grammar's state follows from each choice's tokens."""

    grammar: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling of one request.

    temperature 0 is greedy. top_k -1 (or 0), top_p 1 and min_p 0 are off. `max_tokens` counts every
    generated id, EOS and stop tokens included. `logprobs` is the number of alternatives beside the
    sampled token (0: the sampled token alone; -1: the whole vocabulary), None is off;
    `prompt_logprobs` requests the same for the prompt's tokens, which are then all computed.
    `logprob_token_ids` adds the log-probabilities of these ids at each generated position, and
    makes `logprobs` 0 if it is None. Noise
    is keyed by (seed, choice, position); the router gives a seed to requests that have none.
    Without `detokenize` nobody makes text of the tokens, so no stop string can be looked for.

    What changes logits is a function of the tokens: `repetition_penalty` looks at prompt and
    outputs, frequency and presence at the choice's outputs. `logit_bias` holds (id, bias) pairs;
    `allowed_token_ids` None allows all; `bad_words` are id sequences that must not be generated.
    With `structured` each choice matches a grammar, and ends where nothing more can match.

    With `skip_reading_prefix_cache` the prompt is computed without KV of earlier requests; its own
    KV is cached as ever.

    `extra_args` are arguments for logits processors of other packages, by name.

    With `use_beam_search` the choices are the `n` best answers of a beam search with `n` beams, the
    best first. Nothing is drawn, so temperature and filters have no effect. An answer's score is
    the sum of its log-probabilities divided by its length to the power of `length_penalty`.
    `early_stopping` True ends the search at `n` finished answers; False also goes on while the best
    beam's score, as long as it is, is above the worst of those; "never" while any score that it may
    reach is (see `baton_engine.scheduling.beam_search`).
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
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    structured: StructuredOutput | None = None
    skip_reading_prefix_cache: bool = False
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.logprob_token_ids and self.logprobs is None:
            msgspec.structs.force_setattr(self, "logprobs", 0)

    @property
    def reads_no_cache(self) -> bool:
        """Whether the prompt is computed without cached KV, which has no logits."""
        return self.skip_reading_prefix_cache or self.prompt_logprobs is not None

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def check(self) -> None:
        """Raise InvalidRequest naming the field, the value and the allowed range."""
        _within("n", self.n, 1, MAX_CHOICES)
        _within("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if self.top_k < -1:
            raise InvalidRequest(f"top_k is {self.top_k}; use -1 (off) or more", param="top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p is {self.top_p}; it must be in (0, 1]", param="top_p")
        _within("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens}; use 1 or more", param="max_tokens"
            )
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, ALL_LOGPROBS, MOST_LOGPROBS)
        _at_most("logprob_token_ids", len(self.logprob_token_ids), MAX_LOGPROB_IDS, "ids")
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        if any(not text for text in self.stop):
            raise InvalidRequest("stop holds an empty string", param="stop")
        if self.stop and not self.detokenize:
            raise InvalidRequest(
                "stop needs text, but detokenize is false; leave out one of the two", param="stop"
            )
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
        self._check_logit_changes()
        self._check_beams()

    def _check_logit_changes(self) -> None:
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, ALL_LOGPROBS, MOST_LOGPROBS)
        _within("frequency_penalty", self.frequency_penalty, -PENALTY_RANGE, PENALTY_RANGE)
        _within("presence_penalty", self.presence_penalty, -PENALTY_RANGE, PENALTY_RANGE)
        _within("repetition_penalty", self.repetition_penalty, *REPETITION_RANGE)
        for id, bias in self.logit_bias:
            if not -BIAS_RANGE <= bias <= BIAS_RANGE:
                raise InvalidRequest(
                    f"logit_bias of token {id} is {bias}; it must be in "
                    f"[{exact(-BIAS_RANGE)}, {exact(BIAS_RANGE)}]",
                    param="logit_bias",
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty; name at least one token id", param="allowed_token_ids"
            )
        if self.allowed_token_ids is not None and self.structured is not None:
            raise InvalidRequest(
                "allowed_token_ids and a grammar are both given, which may leave no token to "
                "generate; leave out one of the two",
                param="allowed_token_ids",
            )
        _at_most("logit_bias", len(self.logit_bias), MAX_BIASED, "ids")
        _at_most("allowed_token_ids", len(self.allowed_token_ids or ()), MAX_BIASED, "ids")
        _at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS, "words")
        _at_most("bad_words", sum(map(len, self.bad_words)), MAX_BAD_IDS, "tokens in all words")
        longest = max(map(len, self.bad_words), default=0)
        _at_most("bad_words", longest, MAX_BAD_WORD_IDS, "tokens in one word")
        if not all(self.bad_words):
            raise InvalidRequest("bad_words holds an empty word", param="bad_words")

    def _check_beams(self) -> None:
        _within("length_penalty", self.length_penalty, -LENGTH_PENALTY_RANGE, LENGTH_PENALTY_RANGE)
        for name, default in NOT_WITH_BEAMS.items():
            if self.use_beam_search and getattr(self, name) != default:
                raise beams_refuse(name)


# Parameters that a beam search does not follow, and the values that ask for nothing.
NOT_WITH_BEAMS = {
    name: getattr(SamplingParams(), name)
    for name in (
        "min_tokens",
        "stop",
        "prompt_logprobs",
        "logprob_token_ids",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "structured",
        "extra_args",
    )
}


def beams_refuse(name: str) -> InvalidRequest:
    """The error of a beam search with this parameter."""
    return InvalidRequest(
        f"use_beam_search does not go with {name}: it scores answers by the model's own"
        " log-probabilities, and ends them at EOS, stop_token_ids and max_tokens; leave out one of"
        " both",
        param="use_beam_search",
    )


def logprobs_within(name: str, value: int, most: int, vocab_size: int) -> int:
    """The number of likely tokens that `value` asks for. Raise InvalidRequest for more than `most`,
    the limit of an engine (see --max-logprobs)."""
    count = vocab_size if value == ALL_LOGPROBS else value
    if count > most:
        allowed = f"[0, {most}]" if most < vocab_size else f"[-1, {most}]"
        raise InvalidRequest(
            f"{name} is {value}; the engine's --max-logprobs is {most}, so it must be in {allowed}",
            param=name,
        )
    return count


def check_message(params: SamplingParams) -> None:
    """Refuse answers whose parts that arrive together would be too large for one message. The
    parameters are complete: each number of logprobs is within its limit."""
    named = len(params.logprob_token_ids)
    each = 1 + (params.logprobs or 0) + named
    if params.n * each > MAX_PROMPT_CANDIDATES:
        raise InvalidRequest(
            f"logprobs is {params.logprobs}, logprob_token_ids holds {named} ids, and n is "
            f"{params.n}; (1 + logprobs + ids) x n may be at most {MAX_PROMPT_CANDIDATES}",
            param="logprobs",
        )
    if params.use_beam_search and params.n * each * params.max_tokens > MAX_PROMPT_CANDIDATES:
        raise InvalidRequest(
            f"max_tokens is {params.max_tokens} in a beam search with n {params.n}, whose answers "
            "are sent together; max_tokens x n x (1 + logprobs) may be at most "
            f"{MAX_PROMPT_CANDIDATES}",
            param="max_tokens",
        )


def _at_most(name: str, count: int, limit: int, noun: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} holds {count} {noun}; at most {limit}", param=name)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN fails both comparisons
        bounds = f"[{exact(low)}, {exact(high)}]"
        raise InvalidRequest(f"{name} is {value}; it must be in {bounds}", param=name)
