"""Checks what the engine does not check of a job's request, before the step loop keeps the job."""

from __future__ import annotations

from baton_engine.interface import EngineInfo
from baton_protocol.errors import InvalidRequest
from baton_protocol.request import Request
from baton_protocol.sampling import MAX_PROMPT_CANDIDATES


def check_request(request: Request, info: EngineInfo) -> None:
    """Raise InvalidRequest for token ids outside the vocabulary, a wrong number of outputs, or too
    many prompt logprobs. The engine checks the rest when the request is submitted."""
    if request.outputs and len(request.outputs) != request.params.n:
        raise InvalidRequest(
            f"the request has {len(request.outputs)} outputs for n={request.params.n}", param="n"
        )
    requested = request.params.prompt_logprobs
    if requested is not None and len(request.prompt_ids) * (1 + requested) > MAX_PROMPT_CANDIDATES:
        raise InvalidRequest(
            f"prompt_logprobs is {requested} for {len(request.prompt_ids)} prompt tokens; "
            f"(1 + prompt_logprobs) x prompt tokens may be at most {MAX_PROMPT_CANDIDATES}",
            param="prompt_logprobs",
        )
    for ids in (request.prompt_ids, *request.outputs):
        for id in (min(ids), max(ids)) if ids else ():
            if not 0 <= id < info.vocab_size:
                raise InvalidRequest(
                    f"token id {id} is not in the vocabulary (0..{info.vocab_size - 1})",
                    param="prompt",
                )
