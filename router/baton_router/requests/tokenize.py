"""Turns a parsed call into requests that can be placed: tokenized, hashed, parameters complete.

In: the call, and what the pool serves. Out: one Prepared per prompt. Tokenization happens only
here. If the pool rolls out before a request starts, its chunks are hashed again and its ids stay.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_protocol.hashing import chunk_hashes, extend_hashes, root_hash
from baton_protocol.ids import BlockHash, RequestId
from baton_protocol.policies import Ranking
from baton_protocol.pooling import PoolingParams
from baton_protocol.request import Request
from baton_protocol.resume import ResumeHead, ResumeState
from baton_protocol.sampling import SamplingParams, StructuredOutput
from baton_protocol.store import NodeReport
from baton_router.auth import Tenant
from baton_router.nodes.model_grammars import AnswerRules
from baton_router.nodes.model_offers import Serving
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.call import Call, Prompt, PromptIds, TextPrompt, Truncation
from baton_router.openai.sampling import check_scores, complete, with_counts
from baton_router.openai.structured_output import RequestedGrammar
from baton_router.requests.long_work import in_thread_if_long
from baton_router.requests.pooled_prompt import pooled_ids
from baton_router.requests.prepared import Prepared
from baton_router.requests.served_task import pooling_of
from baton_text.grammars.errors import GrammarError
from baton_text.tokenizer import LONG_TEXT, MOST_AT_ONCE, TextTooLong, Tokenizer

SEED_BITS = 63
BACKGROUND_RANK = (1 << 63) - 1  # the last of an engine's priorities
# Limit for all prompts of a call: each token takes 8 bytes until the call is answered.
MAX_TOKENS = 1 << 20
# Limit for all prompts of a call: each prompt's jobs carry the grammar, at each placement.
MAX_GRAMMARS_BYTES = 16 << 20
# A chat template may leave out parts of a conversation, such as earlier reasoning, but never more
# than 7 of 8 characters.
LEFT_OUT = 8
# Sampling of a request that gets a vector. Nothing is generated, but parameters allow no 0 tokens.
POOLED = SamplingParams(max_tokens=1, temperature=0.0, seed=0, detokenize=False)


async def prepare(
    call: Call,
    serving: Serving,
    base_id: str,
    *,
    tenant: Tenant,
    deadline: float,
    rng: random.Random,
    max_sequences: int | None = None,
    ranking: Ranking | None = None,
    traceparent: str = "",
    shared: bool = False,
    prompts: Sequence[Prompt] | None = None,
    background: bool = False,
) -> list[Prepared]:
    """Tokenize and check every prompt of the call. Raise InvalidRequest or PromptTooLong before any
    is placed. A call for more than `max_sequences` sequences fails before tokenization. `deadline`
    is a time of the router's clock. In a `shared` pool a client may let other tenants go first, but
    not go before them: engines get no priority below 0. A call in the `background` goes last.
    `prompts` are those of the call, if they are rendered already."""
    pooling, field = pooling_of(call, serving), call.names.get("prompt", "prompt")
    if prompts is None:
        prompts = await render_prompts(call, serving)
    _check_sequences(len(prompts), call.sampling.get("n", 1), max_sequences, field)
    parsing = call.parsing(serving.model, prompts)
    sampling = await _check_sampling(call, serving, len(prompts), parsing)
    prepared = []
    tokens = 0
    for slot, prompt in enumerate(prompts):
        if slot:
            await asyncio.sleep(0)  # each takes milliseconds; let other streams run
        ids, second = await _prompt_ids(prompt, serving, call)
        tokens += len(ids)
        if tokens > MAX_TOKENS:
            raise InvalidRequest(
                f"the prompts of one call may have {MAX_TOKENS} tokens together, but the first "
                f"{slot + 1} already have {tokens}; send fewer at a time",
                param=field,
            )
        check_scores(sampling, tokens, call.names)
        params = _params(call, sampling, serving, len(ids), pooling)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=rng.getrandbits(SEED_BITS))
        request = Request(
            id=RequestId(base_id if len(prompts) == 1 else f"{base_id}-{slot}"),
            attempt=1,
            prompt_ids=ids,
            params=params,
            outputs=((),) * params.n,
            tenant=tenant.name,
            salt=tenant.salt,
            traceparent=traceparent,
            continues_prompt=call.continues_prompt,
            priority=BACKGROUND_RANK if background else _rank(call, shared),
            pooling=pooling and msgspec.structs.replace(pooling, second_text=second),
        )
        chunks = await _hash_chunks(request, serving.sample)
        fills = sampling.get("max_tokens") is None and call.default_max_tokens is None
        prepared.append(
            Prepared(
                *(request, chunks, serving, call.options.model, fills, ranking, deadline),
                *(parsing, call.priority),
            )
        )
    return prepared


async def restore(
    call: Call,
    serving: Serving,
    head: ResumeHead,
    state: ResumeState,
    base_id: str,
    *,
    tenant: Tenant,
    deadline: float,
    ranking: Ranking | None = None,
    traceparent: str = "",
) -> Prepared:
    """A request that ran before, to go on after the tokens of `state`. `call` is the parsed body of
    the head. Its ids and parameters are the head's: rendered again, a template may show another
    date, and a seed would be drawn again."""
    prompts = await render_prompts(call, serving)
    request = msgspec.structs.replace(
        head.request,
        id=RequestId(base_id),
        outputs=tuple(map(tuple, state.outputs)),
        tenant=tenant.name,
        salt=tenant.salt,
        traceparent=traceparent,
    )
    return Prepared(
        request=request,
        chunks=await _hash_chunks(request, serving.sample),
        serving=serving,
        wanted=call.options.model,
        fills=False,
        ranking=ranking,
        deadline=deadline,
        parsing=call.parsing(serving.model, prompts),
        priority=call.priority,
        resumed=state,
    )


def _params(
    call: Call,
    sampling: Mapping[str, Any],
    serving: Serving,
    prompt_tokens: int,
    pooling: PoolingParams | None,
) -> SamplingParams:
    """The sampling of one prompt; the seed stays as the client sent it."""
    if pooling is not None and prompt_tokens:
        return POOLED
    return complete(
        sampling,
        serving.model.defaults,
        prompt_tokens=prompt_tokens,
        max_model_len=serving.max_model_len,
        default_max_tokens=call.default_max_tokens,
        names=call.names,
    )


def _rank(call: Call, shared: bool) -> int:
    return max(0, call.priority) if shared else call.priority


def _check_sequences(prompts: int, n: int, limit: int | None, field: str) -> None:
    if limit is not None and prompts * n > limit:
        raise InvalidRequest(
            f"{prompts} prompts with n {n} are {prompts * n} sequences; one call may have at "
            f"most {limit}: send fewer prompts at a time, or ask for fewer choices",
            param=field if prompts > 1 else "n",
            code="too_many_sequences",
        )


def fits_serving(item: Prepared, serving: Serving) -> bool:
    """Whether `serving` can run the same ids instead of the request's own kind."""
    request = item.request
    params = request.params
    room = serving.max_model_len - len(request.prompt_ids)
    needed = max(1, params.min_tokens) if item.fills else params.max_tokens
    if request.pooling is not None:
        needed = 0
    ids = chain(
        request.prompt_ids,
        params.stop_token_ids,
        params.allowed_token_ids or (),
        params.logprob_token_ids,
        (token for token, _ in params.logit_bias),
        *params.bad_words,
    )
    return (
        item.kind.tokenizer == serving.kind.tokenizer
        and item.kind.pooling == serving.kind.pooling
        and room >= needed
        and max(ids) < serving.vocab_size
    )


async def prepare_for_kind(item: Prepared, serving: Serving) -> Prepared:
    """The same request for another kind of nodes; call fits_serving() first."""
    request = item.request
    if item.fills:
        room = serving.max_model_len - len(request.prompt_ids)
        max_tokens = min(request.params.max_tokens, room)
        params = msgspec.structs.replace(request.params, max_tokens=max_tokens)
        request = msgspec.structs.replace(request, params=params)
    chunks = await _hash_chunks(request, serving.sample)
    return replace(item, request=request, chunks=chunks, serving=serving)


async def tokenize_prompt(call: Call, serving: Serving) -> tuple[int, ...]:
    """The ids of a call's only prompt, which may be longer than the model's context. Raise
    PromptTooLong for more than MAX_TOKENS."""
    roomy = replace(serving, max_model_len=MAX_TOKENS + 1)
    try:
        [prompt] = await render_prompts(call, roomy)
        ids, _ = await _prompt_ids(prompt, roomy, call)
        return ids
    except PromptTooLong as error:
        if isinstance(error.__cause__, TextTooLong):
            raise
        field = call.names.get("prompt", "prompt")
        message = f"{field} has more than {MAX_TOKENS} tokens; send it in parts"
        raise PromptTooLong(message, param=field) from None


async def prompt_texts(
    call: Call, serving: Serving, prompts: Sequence[Prompt], all_ids: PromptIds
) -> list[str]:
    """The texts of a call's prompts, which have these ids. That of ids, or of a prompt that may
    have been truncated, is what the ids say."""
    tokenizer, texts = serving.model.tokenizer, list[str]()
    for prompt, ids in zip(prompts, all_ids, strict=True):
        if isinstance(prompt, TextPrompt) and call.truncation is None:
            texts.append(prompt.text)
        else:
            decode = partial(tokenizer.decode, ids, skip_special_tokens=False)
            texts.append(await in_thread_if_long(len(ids), decode))
    return texts


async def render_prompts(call: Call, serving: Serving) -> list[Prompt]:
    """The call's prompts. Render a long conversation in a thread, because rendering holds the
    interpreter lock for tens of milliseconds per 16 MB. Refuse one that is certainly too long
    before rendering it."""
    longest = serving.model.tokenizer.longest_token
    sizes = call.rendered
    most, fits = max(sizes, default=0), LEFT_OUT * (serving.max_model_len - 1) * longest
    if not serving.kind.pooling and most > fits:
        reason = f"is made of {most} characters, at {longest} characters per token at most"
        raise _too_long_error(serving, reason, call.names.get("prompt", "prompt"))
    try:
        if sum(sizes) <= LONG_TEXT:
            return call.prompts(serving.model)
        return await asyncio.to_thread(call.prompts, serving.model)
    except TextTooLong as error:
        raise _unsplittable(error, call.names.get("prompt", "prompt")) from error


async def _prompt_ids(prompt: Prompt, serving: Serving, call: Call) -> tuple[tuple[int, ...], int]:
    """Tokenize one prompt. Return its ids and, of a pair, the value of PoolingParams.second_text.
    Raise PromptTooLong as soon as it certainly exceeds the context, without processing the
    rest."""
    field, model, second = call.names.get("prompt", "prompt"), serving.model, 0
    try:
        if serving.kind.pooling:
            ids, second = await pooled_ids(prompt, serving, call.truncation, field)
        else:
            ids = await _tokenize(prompt, serving, call, field)
    except TextTooLong as error:
        raise _unsplittable(error, field) from error
    if isinstance(prompt, TextPrompt):
        return tuple(ids), second
    check_ids(field, ids, serving.vocab_size)
    return tuple(model.tokenizer.shared(ids)), second


def _unsplittable(error: TextTooLong, field: str) -> PromptTooLong:
    return PromptTooLong(
        f"the prompt has {error.args[0]} characters in a row that this model's tokenizer "
        f"cannot split; at most {MOST_AT_ONCE} are allowed. Shorten {field}",
        param=field,
    )


async def _tokenize(prompt: Prompt, serving: Serving, call: Call, field: str) -> Sequence[int]:
    """The prompt's ids; if truncated, those kept. Raise TextTooLong, PromptTooLong."""
    max_tokens, truncation = serving.max_model_len - 1, call.truncation
    kept = (
        _max_kept_tokens(call, truncation, serving.max_model_len)
        if truncation is not None
        else max_tokens + 1
    )
    # If the limit exceeds what fits, truncation does not help: the prompt is too long either way.
    if truncation is not None and kept <= max_tokens:
        return await _truncate(prompt, kept, truncation.keeps_last, serving)
    if not isinstance(prompt, TextPrompt):
        if len(prompt) > max_tokens:
            raise _too_long_error(serving, f"has {len(prompt)}", field)
        return prompt
    size, longest = len(prompt.text), serving.model.tokenizer.longest_token
    if size > max_tokens * longest:
        reason = f"has {size} characters, at {longest} characters per token at most"
        raise _too_long_error(serving, reason, field)
    ids, complete = await serving.model.encode(
        prompt.text, max_tokens, add_special_tokens=prompt.add_special_tokens
    )
    if not complete:
        raise _too_long_error(serving, f"has more than {max_tokens}", field)
    return ids


async def _truncate(prompt: Prompt, kept: int, keeps_last: bool, serving: Serving) -> Sequence[int]:
    if not isinstance(prompt, TextPrompt):
        return prompt[-kept:] if keeps_last else prompt[:kept]
    special = prompt.add_special_tokens
    if keeps_last:
        return await serving.model.encode_last(prompt.text, kept, add_special_tokens=special)
    ids, _ = await serving.model.encode(prompt.text, kept, add_special_tokens=special)
    return ids[:kept]


def _max_kept_tokens(call: Call, truncation: Truncation, max_model_len: int) -> int:
    """Maximum tokens kept of each prompt. Without a number in the call, keep what the answer leaves
    of the context; an answer without a length leaves all but one token."""
    if truncation.tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens is 0; a prompt needs at least one token",
            param="truncate_prompt_tokens",
        )
    if truncation.tokens is not None:
        return truncation.tokens
    answer: int = call.sampling.get("max_tokens", call.default_max_tokens or 1)
    return max(1, max_model_len - answer)


def _too_long_error(serving: Serving, reason: str, field: str) -> PromptTooLong:
    return PromptTooLong(
        f"this model's maximum context length is {serving.max_model_len} tokens, but the prompt"
        f" {reason}; at least one token must be left to generate. Shorten {field}",
        param=field,
    )


async def _check_sampling(
    call: Call, serving: Serving, prompts: int, parsing: AnswerParsing | None
) -> Mapping[str, Any]:
    """The call's sampling fields: token ids checked against the vocabulary, bad words as ids, and
    the answer's format as a compiled grammar."""
    fields = with_counts(call.sampling, serving.max_logprobs, serving.vocab_size, call.names)
    biased = [token for token, _ in fields.get("logit_bias", ())]
    check_ids("logit_bias", biased, serving.vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_ids(call.names.get(name, name), fields.get(name, ()), serving.vocab_size)
    if parsing is not None and parsing.reads_special and not call.special_tokens_requested:
        fields = {**fields, "skip_special_tokens": False}
    if call.grammar is not None:
        fields = {**fields, "structured": await _compile_format(call.grammar, serving, prompts)}
    if parsing is not None and parsing.rules is not None:
        fields = {
            **fields,
            "structured": await _compile_whole_answer(parsing, parsing.rules, serving, prompts),
        }
    if not call.bad_words:
        return fields
    banned = await asyncio.to_thread(_spell, call.bad_words, serving.model.tokenizer)
    return {**fields, "bad_words": banned}


async def _compile_format(
    requested: RequestedGrammar, serving: Serving, prompts: int
) -> StructuredOutput:
    try:
        grammar = await serving.model.grammar(requested.kind, requested.value)
    except GrammarError as error:
        raise requested.refusal(error) from None
    _check_grammars(requested.field, grammar, prompts)
    return StructuredOutput(grammar)


def _check_grammars(field: str, grammar: str, prompts: int) -> None:
    size = len(grammar.encode())
    if prompts * size > MAX_GRAMMARS_BYTES:
        raise InvalidRequest(
            f"{field} compiles to a grammar of {size} bytes for each of {prompts} "
            f"prompts; one call may have at most {MAX_GRAMMARS_BYTES} bytes: send fewer prompts "
            "at a time",
            param="prompt",
        )


async def _compile_whole_answer(
    parsing: AnswerParsing, rules: AnswerRules, serving: Serving, prompts: int
) -> StructuredOutput:
    """The grammar of a whole answer. Its content was checked alone before, for a clearer error."""
    try:
        grammar = await serving.model.answer_grammar(rules)
    except GrammarError as error:
        raise parsing.refusal(error) from None
    _check_grammars(", ".join(parsing.fields), grammar, prompts)
    return StructuredOutput(grammar)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{name} holds token id {wrong}; ids are in [0, {vocab_size - 1}]", param=name
        )


def _spell(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Ids of each word as written and, unless it starts with a space, also after a space, as in the
    middle of a sentence. Skip the second if it ends with the first, whose ban covers it."""
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word, add_special_tokens=False))
        spellings[plain] = None
        if not word.startswith(" "):
            spaced = tuple(tokenizer.encode(" " + word, add_special_tokens=False))
            if spaced[-len(plain) :] != plain:
                spellings[spaced] = None
    return tuple(spellings)


async def _hash_chunks(request: Request, sample: NodeReport) -> tuple[BlockHash, ...]:
    """The names of the prompt's full chunks; none for a prompt that gets a vector, as nothing
    continues it."""
    if request.pooling is not None:
        return ()
    ids, salt = request.prompt_ids, request.salt
    return await in_thread_if_long(len(ids), partial(_hash_chunks_now, ids, sample, salt))


def _hash_chunks_now(ids: tuple[int, ...], sample: NodeReport, salt: str) -> tuple[BlockHash, ...]:
    layout = sample.layout
    if len(ids) < layout.chunk_tokens:
        return ()
    root = root_hash(sample.fingerprint, salt=salt)
    whole = len(ids) - len(ids) % layout.chunk_tokens
    hashes = extend_hashes(root, ids[:whole], layout.block_size)
    return tuple(chunk_hashes(hashes, layout.chunk_blocks))
