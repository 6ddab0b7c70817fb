"""A router's Serving without a router: a byte-level tokenizer, and a node's report."""

from __future__ import annotations

from typing import Any

from baton_protocol.store import kind_of
from baton_router.nodes.model_offers import Serving
from baton_router.nodes.pool_model import PoolModel
from baton_text.chat import ChatTemplate
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import byte_level_artifacts
from tests.support.nodes.fake_node import make_report


def make_serving(max_model_len: int = 100, **report: Any) -> Serving:
    """Build a Serving; `report` changes fields of the node's report."""
    artifacts = byte_level_artifacts()
    tokenizer = Tokenizer.from_artifacts(artifacts)
    sample = make_report("d", "decode", **({"vocab_size": tokenizer.vocab_size} | report))
    return Serving(
        kind=kind_of(sample),
        model=PoolModel(tokenizer, ChatTemplate.from_artifacts(artifacts), {}),
        names=("m",),
        name="m",
        max_model_len=max_model_len,
        vocab_size=sample.vocab_size,
        max_logprobs=sample.max_logprobs,
        sample=sample,
        weight=1,
    )
