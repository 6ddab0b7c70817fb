"""Totals: the engine's counters since its start.

In: the results of steps. Out: fields of NodeLoad.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from baton_engine.interface import StepResult
from baton_protocol.errors import GrammarDeadEnd

# Positions of drafts in their row that are counted together: first and last of each.
POSITIONS = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, 64))


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
    drafted_rows: int = 0
    draft_seconds_won: float = 0.0
    draft_seconds_lost: float = 0.0
    grammar_dead_ends: int = 0
    # One count for each of POSITIONS.
    drafted_at: list[int] = field(default_factory=lambda: [0] * len(POSITIONS))
    accepted_at: list[int] = field(default_factory=lambda: [0] * len(POSITIONS))

    def count_step(self, result: StepResult) -> None:
        self.engine_steps += result.num_tokens > 0
        self.generated_tokens += len(result.tokens)
        for drafts in result.drafts:
            self.drafted_rows += 1
            self.drafted_tokens += drafts.drafted
            self.accepted_drafts += drafts.accepted
            for place, (first, last) in enumerate(POSITIONS):
                if drafts.drafted < first:
                    break
                self.drafted_at[place] += min(drafts.drafted, last) - first + 1
                self.accepted_at[place] += max(0, min(drafts.accepted, last) - first + 1)
        self.grammar_dead_ends += sum(
            isinstance(failure.error, GrammarDeadEnd) for failure in result.failed
        )
        self.computed_prompt_tokens += result.num_prompt_tokens
        for use in result.prompts:
            self.prompt_tokens += use.prompt
            self.cached_prompt_tokens += use.cached
            self.host_prompt_tokens += use.host
            self.fetched_prompt_tokens += use.fetched

    def count_seconds_won(self, seconds: float) -> None:
        """Drafts of a step have saved `seconds`, or lost them if negative."""
        self.draft_seconds_won += max(0.0, seconds)
        self.draft_seconds_lost += max(0.0, -seconds)

    def figures(self) -> dict[str, Any]:
        """The counters as fields of NodeLoad."""
        counters = asdict(self)
        for name in ("drafted_at", "accepted_at"):
            counts = counters.pop(name)
            counters |= {
                f"{name}_{first}": count
                for (first, _), count in zip(POSITIONS, counts, strict=True)
            }
        return {f"{name}_total": value for name, value in counters.items()}
