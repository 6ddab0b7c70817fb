"""The sampling parameters of drafts: those of the target's samples at the same positions, as drafts
are right most often with these, without logprobs."""

from __future__ import annotations

import msgspec

from baton_protocol.sampling import SamplingParams


def draft_params(params: SamplingParams, vocab_size: int | None = None) -> SamplingParams:
    """The parameters, with the ids below `vocab_size` alone if it is given."""
    if params.logprobs is not None or params.prompt_logprobs is not None:
        params = msgspec.structs.replace(
            params, logprobs=None, prompt_logprobs=None, logprob_token_ids=()
        )
    if vocab_size is None or not (params.logit_bias or params.allowed_token_ids):
        return params
    allowed = params.allowed_token_ids
    return msgspec.structs.replace(
        params,
        logit_bias=tuple(pair for pair in params.logit_bias if pair[0] < vocab_size),
        allowed_token_ids=allowed and tuple(id for id in allowed if id < vocab_size),
    )
