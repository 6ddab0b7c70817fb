"""baton_text is used where torch must never be loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

USES = """
import sys
from baton_text.artifacts import byte_artifacts
from baton_text.chat import ChatTemplate
from baton_text.defaults import generation_defaults
from baton_text.detokenizer import Detokenizer
from baton_text.tokenizer import Tokenizer

artifacts = byte_artifacts()
tokenizer = Tokenizer.from_artifacts(artifacts)
prompt = ChatTemplate.from_artifacts(artifacts).render([{"role": "user", "content": "Hi"}])
ids = tokenizer.encode(prompt, add_special_tokens=False)
detokenizer = Detokenizer(tokenizer, stop=("zzz",))
detokenizer.push(ids)
detokenizer.finish()
generation_defaults(artifacts)
loaded = sorted({"torch", "transformers", "numpy", "redis", "aiohttp"} & set(sys.modules))
sys.exit(f"loaded {loaded}" if loaded else 0)
"""


def test_using_baton_text_loads_neither_torch_nor_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", USES], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
