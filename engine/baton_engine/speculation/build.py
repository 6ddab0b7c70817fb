"""Make the drafter of an engine from its `--speculative-config`."""

from __future__ import annotations

from baton_engine.config.speculative import FLAG, SpeculativeConfig
from baton_engine.errors import SettingsError
from baton_engine.speculation.draft_model import DraftModel
from baton_engine.speculation.drafter import Drafter
from baton_engine.speculation.lookup import PromptLookup, SuffixLookup
from baton_engine.speculation.proposer import Proposer
from baton_engine.speculation.step_clock import StepClock


def make_drafter(
    text: str | None,
    vocab_size: int,
    draft_model: DraftModel | None = None,
    *,
    overlap: bool = False,
) -> Drafter | None:
    """None without a config. Raises SettingsError."""
    if text is None:
        return None
    config = SpeculativeConfig.parse(text)
    return Drafter(
        _proposer(config, draft_model),
        config.num_speculative_tokens,
        vocab_size,
        overlap=overlap,
        clock=StepClock() if draft_model is None else draft_model.clock,
    )


def _proposer(config: SpeculativeConfig, draft_model: DraftModel | None) -> Proposer | None:
    match config.method:
        case "ngram":
            return PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max)
        case "suffix":
            return SuffixLookup(
                config.suffix_decoding_max_tree_depth,
                config.suffix_decoding_max_spec_factor,
                config.suffix_decoding_min_token_prob,
            )
        case "grammar":
            return None
        case "draft_model":
            if draft_model is None:
                raise SettingsError(
                    f"{FLAG}: the simulated engine has no draft model; use ngram, suffix or grammar"
                )
            return draft_model
