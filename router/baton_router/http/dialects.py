"""The dialects that the router speaks, by route."""

from __future__ import annotations

from collections.abc import Mapping

from baton_router.openai.batch_chat import BATCH_CHAT
from baton_router.openai.chat import CHAT
from baton_router.openai.completions import COMPLETIONS
from baton_router.openai.dialect import Dialect
from baton_router.tokens.generate import GENERATE
from baton_router.tokens.scoring import SCORING

DIALECTS: Mapping[str, Dialect] = {
    dialect.route: dialect for dialect in (CHAT, BATCH_CHAT, COMPLETIONS, GENERATE, SCORING)
}
