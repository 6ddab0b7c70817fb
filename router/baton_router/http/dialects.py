"""The dialects that the router speaks, by route, and that of each request's errors and ids."""

from __future__ import annotations

from collections.abc import Mapping

from baton_router.anthropic.messages import MESSAGES
from baton_router.http.headers import VERSION_HEADER
from baton_router.openai.batch_chat import BATCH_CHAT
from baton_router.openai.chat import CHAT
from baton_router.openai.completions import COMPLETIONS
from baton_router.openai.dialect import Dialect
from baton_router.pooling.embeddings import EMBEDDINGS
from baton_router.pooling.rerank import RERANKS
from baton_router.pooling.score import SCORES
from baton_router.responses.call import RESPONSES
from baton_router.tokens.generate import GENERATE
from baton_router.tokens.scoring import SCORING

_GENERATION = (CHAT, BATCH_CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE, SCORING)
_POOLING = (EMBEDDINGS, *SCORES, *RERANKS)
DIALECTS: Mapping[str, Dialect] = {dialect.route: dialect for dialect in (*_GENERATION, *_POOLING)}


def client_dialect(path: str, headers: Mapping[str, str]) -> Dialect | None:
    """The dialect that a client expects in errors, whatever the route; None: OpenAI's."""
    dialect = DIALECTS.get(path)
    if dialect is None and (path.startswith(f"{MESSAGES.route}/") or VERSION_HEADER in headers):
        return MESSAGES
    return dialect
