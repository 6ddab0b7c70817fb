"""The dialects that the router speaks, by route."""

from __future__ import annotations

from collections.abc import Mapping

from baton_router.openai.chat import CHAT
from baton_router.openai.completions import COMPLETIONS
from baton_router.openai.dialect import Dialect
from baton_router.tokens.generate import GENERATE

DIALECTS: Mapping[str, Dialect] = {
    dialect.route: dialect for dialect in (CHAT, COMPLETIONS, GENERATE)
}
