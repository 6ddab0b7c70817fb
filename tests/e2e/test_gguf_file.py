"""`baton up --model FILE.gguf`: the demo model in 4 bits, as its own file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton_cli.models.demo_convert import QUESTION
from baton_cli.models.demo_model import DemoModelError, find_gguf
from tests.support.clients.http import exchange
from tests.support.engines.quantized.gguf_files import make_gguf
from tests.support.engines.tiny_models import prompt_of
from tests.support.pools.baton_up import Pool

pytestmark = pytest.mark.long


def test_the_demo_models_file_answers_a_question(tmp_path: Path) -> None:
    try:
        source = find_gguf()
    except DemoModelError as error:
        pytest.skip(str(error))
    path = tmp_path / "SmolLM2-135M-Instruct.gguf"
    shutil.copy(source, path)
    with Pool(["--model", str(path), "--threads", "1", "--kv-blocks", "200"]) as pool:
        answer = exchange(
            pool.url,
            "/v1/chat/completions",
            {
                "model": "SmolLM2-135M-Instruct",
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": 16,
                "temperature": 0,
            },
        )
    assert answer.status == 200
    assert "Paris" in answer.body["choices"][0]["message"]["content"]


def test_a_pool_hands_requests_off_with_the_answers_of_one_node() -> None:
    path = make_gguf("llama-wide", "Q4_K_M").folder
    flags = [
        *("--model", str(path), "--dtype", "float32", "--threads", "1", "--kv-blocks", "200"),
        *("--chunk-blocks", "1", "--handoff"),
    ]
    texts = []
    for handoff in ("always", "never"):
        with Pool([*flags, handoff]) as pool:
            answer = exchange(
                pool.url,
                "/v1/completions",
                {
                    "model": "model",
                    "prompt": prompt_of(150),
                    "max_tokens": 32,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            )
            assert answer.status == 200
            texts.append(answer.body["choices"][0]["text"])
    assert texts[0] == texts[1]
