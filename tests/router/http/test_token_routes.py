"""Routes that show tokens and generate none: their answers, and who may ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_text.tokenizer import Tokenizer
from tests.router import pools
from tests.support.engines.text_models import byte_level_artifacts
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
CONTINUED = [*MESSAGES, {"role": "assistant", "content": "Well"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
FILES = byte_level_artifacts()
TOKENIZER = Tokenizer.from_artifacts(FILES)
TEXT = "naïve text 🙂"


@pytest.fixture
def worded(decode: FakeNode) -> FakeNode:
    """A node with a tokenizer that has a vocabulary of its own."""
    decode.serve_artifacts(FILES)
    decode.report = msgspec.structs.replace(decode.report, vocab_size=TOKENIZER.vocab_size)
    return decode


def sent(node: FakeNode) -> Sequence[int]:
    """The prompt's ids of the request that the node got last."""
    return list(node.got[-1].request.prompt_ids)  # type: ignore[union-attr]


async def test_a_text_is_tokenized_and_its_tokens_are_a_text(worded: FakeNode) -> None:
    async with pools.running(worded) as client:
        ids = TOKENIZER.encode(TEXT)
        status, answer, _ = await client.post("/tokenize", {"prompt": TEXT})
        limit = worded.report.max_model_len
        assert (status, answer) == (
            200,
            {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None},
        )
        status, answer, _ = await client.post("/detokenize", {"tokens": ids})
        assert (status, answer) == (200, {"prompt": TOKENIZER.decode(ids, False)})
        status, answer, _ = await client.post(
            "/tokenize", {"prompt": TEXT, "return_token_strs": True, "add_special_tokens": False}
        )
        assert answer["token_strs"] == [TOKENIZER.token_name(token) for token in answer["tokens"]]
        assert answer["tokens"] == TOKENIZER.encode(TEXT, add_special_tokens=False)
        assert worded.got == []


@pytest.mark.parametrize("prompt", ["", "x" * 20_000])
async def test_a_prompt_may_be_empty_or_longer_than_the_context(
    decode: FakeNode, prompt: str
) -> None:
    async with pools.running(decode) as client:
        status, answer, _ = await client.post("/tokenize", {"prompt": prompt})
        assert (status, answer["count"]) == (200, len(answer["tokens"]))
        assert answer["count"] >= len(prompt) > answer["max_model_len"] or not prompt


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"messages": MESSAGES}, id="a question"),
        pytest.param({"messages": MESSAGES, "tools": TOOLS}, id="tools"),
        pytest.param({"messages": MESSAGES, "add_special_tokens": True}, id="special tokens"),
        pytest.param({"messages": CONTINUED, "add_generation_prompt": False}, id="no new turn"),
        pytest.param({"messages": CONTINUED, "continue_final_message": True}, id="continued"),
    ],
)
async def test_the_tokens_of_a_chat_are_those_that_a_node_gets(
    worded: FakeNode, body: dict[str, Any]
) -> None:
    async with pools.running(worded) as client:
        status, _, _ = await client.post(CHAT, body | {"max_tokens": 4})
        assert status == 200
        ids = sent(worded)
        _, tokenized, _ = await client.post("/tokenize", body)
        assert tokenized["tokens"] == ids
        _, rendered, _ = await client.post(f"{CHAT}/render", body)
        assert rendered["token_ids"] == ids
        special = body.get("add_special_tokens", False)
        assert TOKENIZER.encode(rendered["prompt"], add_special_tokens=special) == ids
        assert rendered["request_id"].startswith("chatcmpl-")
        assert (rendered["stream"], rendered["priority"]) == (False, 0)
        assert len(worded.got) == 1


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"prompt": "one"}, ["one"]),
        ({"prompt": ["one", "two"], "stream": True}, ["one", "two"]),
        ({"prompt": TOKENIZER.encode("ids", False)}, ["ids"]),
        ({"prompt": "a long text", "truncate_prompt_tokens": 1}, ["text"]),
    ],
)
async def test_the_prompts_of_a_completion_are_those_that_nodes_get(
    worded: FakeNode, body: dict[str, Any], texts: Sequence[str]
) -> None:
    async with pools.running(worded) as client:
        status, answer, _ = await client.post(f"{COMPLETIONS}/render", body)
        assert status == 200
        assert [prompt["prompt"] for prompt in answer] == texts
        assert all(prompt["stream"] == body.get("stream", False) for prompt in answer)
        assert worded.got == []
        body = body | {"stream": False, "max_tokens": 1}
        assert (await client.post(COMPLETIONS, body))[0] == 200
        got = {tuple(job.request.prompt_ids) for job in worded.got}  # type: ignore[union-attr]
        assert got == {tuple(prompt["token_ids"]) for prompt in answer}


async def test_the_tokenizers_configuration_has_the_chat_template(worded: FakeNode) -> None:
    async with pools.running(worded) as client:
        status, info, _ = await client.get("/tokenizer_info")
        assert status == 200
        config = json.loads(FILES.get("tokenizer_config.json", b"{}"))
        assert info.items() >= {**config, "chat_template": info["chat_template"]}.items()
        assert info["tokenizer_class"]
        assert (await client.get("/tokenizer_info?model=other"))[0] == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"tools": TOOLS}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": TOOLS}, "tools"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "temperature": 1}, "temperature"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": 1},
            "continue_final_message",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        (f"{CHAT}/render", {"messages": MESSAGES, "temperature": -1}, "temperature"),
        (f"{COMPLETIONS}/render", {"prompt": "x" * 20_000}, "prompt"),
    ],
)
async def test_a_wrong_body_is_refused_by_name(
    decode: FakeNode, path: str, body: dict[str, Any], param: str
) -> None:
    async with pools.running(decode) as client:
        status, answer, _ = await client.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        (f"{CHAT}/render", {"messages": MESSAGES}),
    ],
)
async def test_another_models_name_and_a_body_that_is_too_large_are_refused(
    decode: FakeNode, path: str, body: dict[str, Any]
) -> None:
    async with pools.running(decode, max_body_bytes=100) as client:
        assert (await client.post(path, body))[0] == 200
        assert (await client.post(path, body | {"model": "other"}))[0] == 404
        assert (await client.post(path, body | {"model": "x" * 100}))[0] == 413


async def test_a_tenants_key_is_enough(decode: FakeNode, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme sk-of-acme\n")
    async with pools.running(decode, api_keys=str(keys)) as client:
        for key, status in (("sk-of-acme", 200), ("sk-unknown", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.post("/tokenize", {"prompt": "x"}, headers))[0] == status
            assert (await client.get("/tokenizer_info", headers))[0] == status
