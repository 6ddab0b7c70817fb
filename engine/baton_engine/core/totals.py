"""Totals: the engine's counters since its start.

In: the results of steps. Out: fields of NodeLoad.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from baton_engine.interface import StepResult
from baton_protocol.errors import GrammarDeadEnd


@dataclass(slots=True)
class Totals:
    """Counters since the engine started. NodeLoad has the same names with the suffix `_total`."""

    engine_steps: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    host_prompt_tokens: int = 0
    fetched_prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    grammar_dead_ends: int = 0

    def count_step(self, result: StepResult) -> None:
        self.engine_steps += result.num_tokens > 0
        self.generated_tokens += len(result.tokens)
        self.drafted_tokens += result.drafted
        self.accepted_drafts += result.accepted
        self.grammar_dead_ends += sum(
            isinstance(failure.error, GrammarDeadEnd) for failure in result.failed
        )
        self.computed_prompt_tokens += result.num_prompt_tokens
        for use in result.prompts:
            self.prompt_tokens += use.prompt
            self.cached_prompt_tokens += use.cached
            self.host_prompt_tokens += use.host
            self.fetched_prompt_tokens += use.fetched

    def figures(self) -> dict[str, int]:
        """The counters as fields of NodeLoad."""
        return {f"{name}_total": value for name, value in asdict(self).items()}
