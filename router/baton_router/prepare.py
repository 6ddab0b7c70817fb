"""From a parsed call to requests that can be placed: tokenized once, hashed, parameters complete.

In: the call, and what the pool serves. Out: one Prepared per prompt. Nobody tokenizes again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_protocol.hashing import chunk_hashes, extend_hashes, root_hash
from baton_protocol.ids import BlockHash, RequestId
from baton_protocol.request import Request
from baton_protocol.store import NodeReport
from baton_router.calls import Call, Prompt, TextPrompt
from baton_router.dispatch import Prepared
from baton_router.fleet import Serving
from baton_router.parameters import complete

# Hashing a block takes 2 us; longer prompts are hashed in a thread.
LONG_PROMPT = 8192
SEED_BITS = 63


async def prepare(
    call: Call, serving: Serving, base_id: str, *, deadline: float, rng: random.Random
) -> list[Prepared]:
    """Raise InvalidRequest (PromptTooLong) before anything is placed."""
    prompts = call.prompts(serving.model)
    prepared = []
    for slot, prompt in enumerate(prompts):
        ids = await _ids(prompt, serving)
        params = complete(
            call.sampling,
            serving.model.defaults,
            prompt_tokens=len(ids),
            max_model_len=serving.max_model_len,
            default_max_tokens=call.default_max_tokens,
        )
        _check_stop_ids(params.stop_token_ids, serving.vocab_size)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=rng.getrandbits(SEED_BITS))
        request = Request(
            id=RequestId(base_id if len(prompts) == 1 else f"{base_id}-{slot}"),
            attempt=1,
            prompt_ids=ids,
            params=params,
            outputs=((),) * params.n,
            deadline=deadline,
        )
        prepared.append(Prepared(request, await _chunks(ids, serving.sample)))
    return prepared


async def _ids(prompt: Prompt, serving: Serving) -> tuple[int, ...]:
    if isinstance(prompt, TextPrompt):
        text, special = prompt.text, prompt.add_special_tokens
        return tuple(await serving.model.encode(text, add_special_tokens=special))
    wrong = next((token for token in prompt if not 0 <= token < serving.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"prompt holds token id {wrong}; ids are in [0, {serving.vocab_size - 1}]",
            param="prompt",
        )
    return prompt


def _check_stop_ids(ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"stop_token_ids holds {token}; ids are in [0, {vocab_size - 1}]",
                param="stop_token_ids",
            )


async def _chunks(ids: tuple[int, ...], sample: NodeReport) -> tuple[BlockHash, ...]:
    if len(ids) <= LONG_PROMPT:
        return _chunk_names(ids, sample)
    return await asyncio.to_thread(_chunk_names, ids, sample)


def _chunk_names(ids: tuple[int, ...], sample: NodeReport) -> tuple[BlockHash, ...]:
    layout = sample.layout
    if len(ids) < layout.chunk_tokens:
        return ()
    hashes = extend_hashes(root_hash(sample.fingerprint), ids, layout.block_size)
    return tuple(chunk_hashes(hashes, layout.chunk_blocks))
