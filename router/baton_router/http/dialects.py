"""The dialects that the router speaks, by route."""

from __future__ import annotations

from collections.abc import Mapping

from baton_router.openai.chat import CHAT
from baton_router.openai.completions import COMPLETIONS
from baton_router.openai.dialect import Dialect
from baton_router.pooling.embeddings import EMBEDDINGS
from baton_router.pooling.rerank import RERANKS
from baton_router.pooling.score import SCORES

DIALECTS: Mapping[str, Dialect] = {
    dialect.route: dialect for dialect in (CHAT, COMPLETIONS, EMBEDDINGS, *SCORES, *RERANKS)
}
