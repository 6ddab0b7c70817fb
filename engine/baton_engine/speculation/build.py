"""Make the drafter of an engine from its `--speculative-config`."""

from __future__ import annotations

from baton_engine.config.speculative import FLAG, SpeculativeConfig
from baton_engine.errors import SettingsError
from baton_engine.speculation.draft_model import DraftModel
from baton_engine.speculation.drafter import Drafter
from baton_engine.speculation.lookup import PromptLookup, SuffixLookup
from baton_engine.speculation.loss_limit import LossLimit
from baton_engine.speculation.proposer import Proposer


def make_drafter(
    text: str | None,
    vocab_size: int,
    drafting: Proposer | None = None,
    *,
    overlap: bool = False,
) -> Drafter | None:
    """None without a config. `drafting` is the proposer of a method that needs a model or a head,
    if the engine has one. Raises SettingsError."""
    if text is None:
        return None
    config = SpeculativeConfig.parse(text)
    if drafting is None and config.needs_weights:
        raise SettingsError(
            f"{FLAG}: the simulated engine has no weights for {config.method}; use ngram, suffix or"
            " grammar"
        )
    return Drafter(
        _lookup(config) if drafting is None else drafting,
        config.num_speculative_tokens,
        vocab_size,
        overlap=overlap,
        clock=drafting.clock if isinstance(drafting, DraftModel) else None,
        limit=LossLimit() if isinstance(drafting, DraftModel) else None,
    )


def _lookup(config: SpeculativeConfig) -> Proposer | None:
    match config.method:
        case "ngram":
            return PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max)
        case "suffix":
            return SuffixLookup(
                config.suffix_decoding_max_tree_depth,
                config.suffix_decoding_max_spec_factor,
                config.suffix_decoding_min_token_prob,
            )
        case _:
            return None
