"""Routes that show a model's tokens and generate none: /tokenize, /detokenize, /tokenizer_info, and
/v1/chat/completions/render and /v1/completions/render, with vLLM's names; and Anthropic's
/v1/messages/count_tokens.

In: aiohttp requests; the middleware has set their tenant. Out: JSON. They need the model's small
files, which the router has, and no node. Bodies have the bounds of a generation's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import StructuredOutput
from baton_router.anthropic.answers import CountedTokens
from baton_router.anthropic.fields import COUNT_ROUTE
from baton_router.anthropic.messages import MessagesCall
from baton_router.http.body_limits import BodyLimits
from baton_router.http.json_response import json_response
from baton_router.http.observers import CONTEXT
from baton_router.nodes.model_offers import ModelOffers, Serving
from baton_router.openai.answers import Closed
from baton_router.openai.call import Call
from baton_router.openai.chat import CHAT
from baton_router.openai.completions import COMPLETIONS
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.table import read_fields
from baton_router.openai.fields.tokens import DetokenizeFields
from baton_router.openai.json_body import decode_object
from baton_router.openai.tokenize_call import TokenizeCall
from baton_router.requests.long_work import in_thread_if_long
from baton_router.requests.prepared import Prepared
from baton_router.requests.tokenize import (
    check_ids,
    prepare,
    prompt_texts,
    render_prompts,
    tokenize_prompt,
)
from baton_router.settings import RouterSettings
from baton_router.tokens.generate_fields import SamplingFields
from baton_text.tokenizer import Tokenizer

CHAT_RENDER, COMPLETIONS_RENDER = "/v1/chat/completions/render", "/v1/completions/render"
TOKENIZE, DETOKENIZE, TOKENIZER_INFO = "/tokenize", "/detokenize", "/tokenizer_info"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # of a model whose files name none


class Tokenized(Closed):
    """The tokens of a prompt. `token_strs` is null if the client did not ask for them."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str] | None = None


class Detokenized(Closed):
    """The text of tokens, special ones included."""

    prompt: str


class RenderedPrompt(Closed):
    """What a call would send to a node, as a body of /inference/v1/generate: the ids of one prompt,
    and its sampling. `prompt` is its text, before the tokenizer adds its own tokens."""

    request_id: str
    model: str
    token_ids: Sequence[int]
    prompt: str
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: dict[str, bool] | None
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRoutes:
    settings: RouterSettings
    offers: ModelOffers
    bodies: BodyLimits
    rng: random.Random
    clock: Callable[[], float]

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(TOKENIZE, self.tokenize),
            web.post(DETOKENIZE, self.detokenize),
            web.post(COUNT_ROUTE, self.count_tokens),
            web.get(TOKENIZER_INFO, self.tokenizer_info),
            web.post(CHAT_RENDER, self.render_chat),
            web.post(COMPLETIONS_RENDER, self.render_completions),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        async with self.bodies.of(request, request[CONTEXT].tenant_name) as body:
            asked = await body.parsed(TokenizeCall.parse)
            serving = self.offers.choose(asked.call.options.model)
            async with body.turn():
                ids = await tokenize_prompt(asked.call, serving)
            names = None
            if asked.token_strs:
                names = await in_thread_if_long(
                    len(ids), partial(_names, serving.model.tokenizer, ids)
                )
        return json_response(
            Tokenized(
                count=len(ids),
                max_model_len=serving.max_model_len,
                tokens=ids,
                token_strs=names,
            )
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        async with self.bodies.of(request, request[CONTEXT].tenant_name) as body:
            fields = await body.parsed(_detokenize_fields)
            serving, ids = self.offers.choose(fields.model), fields.tokens
            check_ids("tokens", ids, serving.vocab_size)
            text = await in_thread_if_long(
                len(ids), partial(serving.model.tokenizer.decode, ids, skip_special_tokens=False)
            )
        return json_response(Detokenized(prompt=text))

    async def count_tokens(self, request: web.Request) -> web.Response:
        async with self.bodies.of(request, request[CONTEXT].tenant_name) as body:
            call = await body.parsed(MessagesCall.parse_counted)
            serving = self.offers.choose(call.options.model)
            async with body.turn():
                ids = await tokenize_prompt(call, serving)
        return json_response(CountedTokens(input_tokens=len(ids)))

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        """tokenizer_config.json, with the chat template wherever the model has it."""
        model = self.offers.choose(request.query.get("model")).model
        info: dict[str, Any] = {"tokenizer_class": TOKENIZER_CLASS, **model.tokenizer_config}
        if model.template.source:
            info["chat_template"] = model.template.source
        return json_response(info)

    async def render_chat(self, request: web.Request) -> web.Response:
        [prompt] = await self._render(request, CHAT)
        return json_response(prompt)

    async def render_completions(self, request: web.Request) -> web.Response:
        return json_response(await self._render(request, COMPLETIONS))

    async def _render(self, request: web.Request, dialect: Dialect) -> list[RenderedPrompt]:
        """One per prompt of the call. Refuses what the call itself would be refused for."""
        context = request[CONTEXT]
        assert context.tenant is not None, "the middleware sets the tenant"
        async with self.bodies.of(request, context.tenant_name) as body:
            call = await body.parsed(dialect.parse)
            if call.sampling.get("use_beam_search"):
                raise InvalidRequest(
                    "use_beam_search is true; what is rendered has no beams: leave it out",
                    param="use_beam_search",
                )
            serving = self.offers.choose(call.options.model)
            async with body.turn():
                prompts = await render_prompts(call, serving)
                prepared = await prepare(
                    call,
                    serving,
                    context.id,
                    tenant=context.tenant,
                    deadline=self.clock() + self.settings.request_timeout_s,
                    rng=self.rng,
                    prompts=prompts,
                )
                ids = [item.request.prompt_ids for item in prepared]
                texts = await prompt_texts(call, serving, prompts, ids)
        return [
            RenderedPrompt(
                request_id=f"{dialect.prefix}{item.request.id}",
                model=_name(call, serving),
                token_ids=item.request.prompt_ids,
                prompt=text,
                sampling_params=_sampling_of(call, item),
                stream=call.options.stream,
                stream_options=_stream_options(call),
                priority=call.priority,
            )
            for item, text in zip(prepared, texts, strict=True)
        ]


def _detokenize_fields(data: bytearray) -> DetokenizeFields:
    return read_fields(DetokenizeFields, decode_object(data))


def _sampling_of(call: Call, prepared: Prepared) -> dict[str, Any]:
    """The parameters that differ from their defaults, in the form of `sampling_params`. A seed is
    there only if the client sent one."""
    params = prepared.request.params
    given: dict[str, Any] = msgspec.to_builtins(params)
    fields = {name: value for name, value in given.items() if name in SamplingFields.FIELDS}
    fields["max_tokens"] = params.max_tokens
    if call.sampling.get("seed") is None:
        del fields["seed"]
    if call.options.stream:  # an echo's; a stream of ids has none
        fields.pop("prompt_logprobs", None)
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.bad_words:
        fields["bad_words"] = list(call.bad_words)
    if params.structured is not None:
        fields["structured_outputs"] = _outputs_of(call, prepared, params.structured)
    return fields


def _outputs_of(call: Call, prepared: Prepared, structured: StructuredOutput) -> dict[str, Any]:
    """What the answer must match: as the client sent it, unless tools or reasoning add to it."""
    asked = call.grammar
    if asked is None or (prepared.parsing is not None and prepared.parsing.rules is not None):
        return {"grammar": structured.grammar}
    return {asked.kind: asked.value or True}


def _stream_options(call: Call) -> dict[str, bool] | None:
    if not call.options.include_usage:
        return None
    return {
        "include_usage": True,
        "continuous_usage_stats": call.options.continuous_usage,
    }


def _name(call: Call, serving: Serving) -> str:
    return call.options.model or serving.name


def _names(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_name(token_id) for token_id in ids]
