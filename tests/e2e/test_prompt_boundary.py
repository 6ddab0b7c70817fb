"""The space between a prompt and its output, with a tokenizer that drops a text's leading space.

The tests use a real model with a Unigram tokenizer, in a pool and offline. Only one id, of a word
with a leading space, is allowed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton_engine.llm import LLM
from baton_protocol.sampling import SamplingParams
from baton_text.artifacts import read_artifacts
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import unigram_artifacts, write_artifacts
from tests.support.pools.baton_up import Pool


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unigram") / "model"
    shutil.copytree(tiny_model("llama-gqa2-tied"), folder)
    return write_artifacts(unigram_artifacts(), folder)


@pytest.fixture(scope="module")
def word(folder: Path) -> int:
    """The id of a word that begins with a space."""
    tokenizer = Tokenizer.from_artifacts(read_artifacts(folder))
    [word] = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.token_text(word) == " the"
    return word


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    flags = [
        *("--model", str(folder), "--dtype", "float32", "--threads", "1", "--kv-blocks", "400"),
        *("--prefill", "1", "--decode", "1", "--handoff", "always", "--chunk-blocks", "1"),
    ]
    with (
        Pool(flags) as pool,
        openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_keeps_the_space_after_its_prompt_and_a_chat_message_has_none(
    client: openai.OpenAI, word: int, stream: bool
) -> None:
    fields: dict[str, Any] = {
        **{"model": "", "max_tokens": 2, "temperature": 0, "stream": stream},
        "extra_body": {"allowed_token_ids": [word], "ignore_eos": True},
    }
    fields["model"] = client.models.list().data[0].id
    response: Any = client.completions.create(prompt="the quick", echo=True, **fields)
    events = response if stream else [response]
    assert "".join(one.choices[0].text for one in events) == "the quick the the"

    message = {"role": "user", "content": "the quick"}
    response = client.chat.completions.create(messages=[message], **fields)  # type: ignore[list-item]
    events = [one.choices[0] for one in (response if stream else [response])]
    texts = [(one.delta if stream else one.message).content or "" for one in events]
    assert "".join(texts) == "the the"


def test_the_offline_engine_keeps_the_same_spaces(folder: Path, word: int) -> None:
    llm = LLM(folder, dtype="float32", kv_blocks=100)
    params = SamplingParams(
        max_tokens=2, temperature=0.0, allowed_token_ids=(word,), ignore_eos=True
    )
    [completion] = llm.generate("the quick", params)
    assert completion.outputs[0].text == " the the"
    [message] = llm.chat([{"role": "user", "content": "the quick"}], params)
    assert message.outputs[0].text == "the the"
