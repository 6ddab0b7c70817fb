"""POST /inference/v1/generate: ids in and out, in answers, streams and errors, and the way from a
rendered chat or completion to it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton_protocol import LOGPROB_IDS_SINCE
from baton_protocol.link import PrefillJob, RunJob
from baton_protocol.sampling import MAX_LOGPROB_IDS, SamplingParams
from baton_router.tokens.generate import Generated, GeneratedChunk
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

GENERATE = "/inference/v1/generate"
IDS = [72, 105, 33]
REPLY = list(pools.REPLY.encode())
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "Hi"}]


def params_of(node: FakeNode) -> SamplingParams:
    job = node.got[-1]
    assert isinstance(job, RunJob | PrefillJob)
    return job.request.params


async def generated(client: pools.Client, **body: Any) -> Generated:
    status, answer, _ = await client.post(GENERATE, {"token_ids": IDS, **body})
    assert status == 200, answer
    return msgspec.convert(answer, Generated)


async def chunks(client: pools.Client, **body: Any) -> list[GeneratedChunk]:
    body = {"token_ids": IDS, "stream": True, **body}
    async with client.session.post(client.url + GENERATE, json=body) as response:
        events = (await response.text()).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [
        msgspec.json.decode(event.removeprefix("data: "), type=GeneratedChunk)
        for event in events[:-1]
    ]


async def test_ids_in_are_ids_out_and_no_text_is_made(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        answer = await generated(client, sampling_params={"temperature": 0, "n": 2})
        assert [choice.token_ids for choice in answer.choices] == [REPLY, REPLY]
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        assert (answer.output_mode, answer.model) == ("tokens", "fake-model")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2 * len(REPLY))
        assert answer.request_id.startswith("generate-tokens-")
        assert not params_of(decode).detokenize
        room = decode.report.max_model_len - len(IDS)
        assert params_of(decode).max_tokens == room


async def test_logprobs_are_by_id_with_the_likeliest_and_then_the_named(decode: FakeNode) -> None:
    sampling = {"logprobs": 2, "logprob_token_ids": [7, 73], "prompt_logprobs": 1, "max_tokens": 1}
    async with pools.running(decode) as client:
        answer = await generated(client, sampling_params=sampling, return_token_ids=True)
        assert answer.prompt_token_ids == IDS
        assert answer.prompt_logprobs is not None
        assert [entry and set(entry) for entry in answer.prompt_logprobs] == [
            *(None, {"105"}, {"33"})
        ]
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        [position] = logprobs.content
        assert (position.token_id, position.rank) == (REPLY[0], 1)
        shown = [(each.token_id, each.rank) for each in position.top_logprobs]
        assert shown == [(72, 1), (73, 2), (7, None)]
        text = await generated(client, sampling_params=sampling, output_mode="text")
        assert text.choices[0].text == pools.REPLY[0]
        assert text.choices[0].logprobs is not None
        [position] = text.choices[0].logprobs.content
        assert (position.token, position.bytes) == ("H", [72])
        as_ids = await generated(
            client,
            sampling_params=sampling,
            output_mode="text",
            return_tokens_as_token_ids=True,
        )
        assert as_ids.choices[0].logprobs is not None
        assert as_ids.choices[0].logprobs.content[0].token == "token_id:72"


async def test_a_stream_has_the_same_ids_and_its_usage(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        found = await chunks(
            client,
            request_id="mine",
            return_token_ids=True,
            stream_options={"include_usage": True},
            sampling_params={"logprobs": 0},
        )
        *events, last = found
        assert [id for event in events for id in event.choices[0].token_ids] == REPLY
        assert events[0].prompt_token_ids == IDS
        assert {event.request_id for event in found} == {"generate-tokens-mine"}
        assert events[-1].choices[0].finish_reason == "stop"
        assert (last.choices, last.usage and last.usage.completion_tokens) == ([], len(REPLY))
        for event in events:
            assert event.choices[0].logprobs is not None
            assert len(event.choices[0].logprobs.content) == len(event.choices[0].token_ids)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "seed": 5, "stop": ["x"]}),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 16},
        ),
        (
            "/v1/completions",
            {"prompt": "Hi", "logit_bias": {"7": 2}, "bad_words": ["no"], "min_tokens": 2},
        ),
        ("/v1/completions", {"prompt": "Hi", "length_penalty": 2.0, "vllm_xargs": {"a": 1}}),
        (
            "/v1/completions",
            {"prompt": "Hi", "structured_outputs": {"json": {"type": "object"}}, "top_k": 3},
        ),
    ],
)
async def test_what_render_answers_generates_as_the_call_itself(
    decode: FakeNode, path: str, body: dict[str, Any]
) -> None:
    async with pools.running(decode) as client:
        status, rendered, _ = await client.post(f"{path}/render", body)
        assert status == 200, rendered
        [rendered] = rendered if isinstance(rendered, list) else [rendered]
        assert (await client.post(path, body))[0] == 200
        expected = params_of(decode)
        status, answer, _ = await client.post(GENERATE, rendered)
        assert status == 200, answer
        assert answer["request_id"] == "generate-tokens-" + rendered["request_id"]
        found = params_of(decode)
        assert ("seed" in rendered["sampling_params"]) == ("seed" in body)
        # Nothing reads the text, and there are no beams.
        alike = {"seed": found.seed, "detokenize": found.detokenize, "length_penalty": 1.0}
        assert found == msgspec.structs.replace(expected, **alike)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["x"]}, "token_ids"),
        ({"token_ids": [1 << 40]}, "token_ids"),
        ({"sampling_params": 1}, "sampling_params"),
        ({"sampling_params": {"temperatur": 1}}, "sampling_params.temperatur"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        (
            {"sampling_params": {"logprob_token_ids": [1 << 40]}},
            "sampling_params.logprob_token_ids",
        ),
        (
            {"sampling_params": {"logprob_token_ids": [1] * (MAX_LOGPROB_IDS + 1)}},
            "sampling_params.logprob_token_ids",
        ),
        ({"sampling_params": {"detokenize": False, "stop": ["x"]}}, "stop"),
        (
            {"sampling_params": {"detokenize": False}, "output_mode": "text"},
            "sampling_params.detokenize",
        ),
        (
            {"sampling_params": {"prompt_logprobs": 1}, "stream": True},
            "sampling_params.prompt_logprobs",
        ),
        ({"sampling_params": {"max_tokens": 1 << 30}}, "sampling_params.max_tokens"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"output_mode": "json"}, "output_mode"),
        ({"reasoning_ended": False}, "reasoning_ended"),
    ],
)
async def test_a_wrong_body_is_an_error_that_names_its_member(
    decode: FakeNode, body: dict[str, Any], param: str
) -> None:
    async with pools.running(decode) as client:
        status, answer, _ = await client.post(GENERATE, {"token_ids": IDS} | body)
        assert (status, answer["error"]["param"]) == (400, param), json.dumps(answer)


async def test_a_rendered_stream_with_an_echo_s_logprobs_can_be_generated(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        body = {"prompt": "Hi", "echo": True, "logprobs": 1, "stream": True, "max_tokens": 2}
        [rendered] = (await client.post("/v1/completions/render", body))[1]
        assert rendered["stream"]
        found = await chunks(client, **rendered)
        assert [id for event in found for id in event.choices[0].token_ids] == REPLY[:2]


async def test_a_search_with_beams_is_not_rendered(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        body = {"prompt": "Hi", "use_beam_search": True, "n": 2}
        status, answer, _ = await client.post("/v1/completions/render", body)
        assert (status, answer["error"]["param"]) == (400, "use_beam_search")


async def test_named_ids_are_for_nodes_that_know_of_them(decode: FakeNode) -> None:
    async with FakeNode("decode-9", "decode", protocol=LOGPROB_IDS_SINCE - 1) as older:
        async with pools.running(decode, older) as client:
            for _ in range(4):
                await generated(client, sampling_params={"logprob_token_ids": [1]})
            assert len(decode.got_of(RunJob)) == 4
        async with pools.running(older, unready_wait_s=0) as client:
            body = {"token_ids": IDS, "sampling_params": {"logprob_token_ids": [1]}}
            status, answer, _ = await client.post(GENERATE, body)
            assert (status, answer["error"]["code"]) == (503, "unavailable")
            needed = f"logprob_token_ids needs protocol version {LOGPROB_IDS_SINCE}"
            assert needed in answer["error"]["message"]
            assert (await client.post(GENERATE, {"token_ids": IDS}))[0] == 200


async def test_an_answer_s_id_is_explained(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        answer = await generated(client)
        status, explained, _ = await client.get(f"/requests/{answer.request_id}")
        assert (status, explained["endpoint"]) == (200, "generate")


async def test_all_ids_of_the_vocabulary_may_have_logprobs(decode: FakeNode) -> None:
    vocabulary = decode.report.vocab_size
    decode.report = msgspec.structs.replace(decode.report, max_logprobs=vocabulary)
    async with pools.running(decode) as client:
        chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1, "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", chat))[0] == 200
        assert params_of(decode).logprobs == vocabulary
        answer = await generated(client, sampling_params={"logprobs": -1, "max_tokens": 1})
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == vocabulary
