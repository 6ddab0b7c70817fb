"""The parameters and outputs of LLM.beam_search(), with vLLM's names.

In: BeamSearchParams; later the RequestOutput of the search. Out: sampling parameters; one
BeamSearchOutput per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton_engine.offline.outputs import CompletionOutput, EndReason, RequestOutput
from baton_protocol.request import PositionLogprobs
from baton_protocol.sampling import EarlyStopping, SamplingParams

if TYPE_CHECKING:
    from baton_text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """A beam search, see `baton_engine.scheduling.beam_search`. `length_penalty` and
    `early_stopping` are as in transformers: lengths count the answer's tokens. `temperature` is
    accepted as in vLLM, and has no effect: scores are the model's own log-probabilities."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=0,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One answer. As in vLLM, `tokens` and `text` begin with the prompt's; `logprobs` do not.
    `text` is None if the model has no tokenizer. `score` orders the answers: `cum_logprob` with the
    length penalty."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float
    score: float
    text: str | None
    finish_reason: EndReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The answers to one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    return BeamSearchOutput(
        [_sequence(output, choice, params, tokenizer) for choice in output.outputs]
    )


def _sequence(
    output: RequestOutput,
    choice: CompletionOutput,
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> BeamSearchSequence:
    logprobs = choice.logprobs or []
    total = sum(position.sampled.logprob for position in logprobs)
    text = output.prompt
    if text is None and tokenizer is not None:
        from baton_text.detokenizer import TextReader

        reader = TextReader(tokenizer, skip_special=params.skip_special_tokens)
        text = reader.read(output.prompt_token_ids) + reader.finish()
    return BeamSearchSequence(
        tokens=[*output.prompt_token_ids, *choice.token_ids],
        logprobs=logprobs,
        cum_logprob=total,
        score=total / len(logprobs) ** params.length_penalty,
        text=None if text is None or tokenizer is None else text + choice.text,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
