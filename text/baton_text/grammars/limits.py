"""Limits of grammars, and how grammars write JSON. Equal on all nodes and routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLParserLimits

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 256 << 10  # size of a client's schema, regex or grammar
MAX_EBNF_BYTES = 16 << 10  # translation to Lark takes time quadratic in its length
MAX_JSON_DEPTH = 64  # nesting levels of objects and arrays in a schema
MAX_CHOICES = 1024
# llguidance compiles recursively; more references or rules would exhaust its thread's stack.
MAX_REFERENCED_LEVELS = 1000  # nesting levels of all parts to which a schema refers, together
MAX_PATTERNS = 64  # patternProperties of a schema, together
MAX_RULES = 1000  # rules of a grammar in Lark or EBNF
# With unbounded whitespace between JSON tokens, a model may emit whitespace up to max_tokens.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t]{0,2}",
}
# About 20 ms of work per grammar and 10 ms per token, see llguidance's LLParserLimits. Equal on all
# nodes, so that all accept the same grammars.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
