"""Make the drafter of an engine from its `--speculative-config`."""

from __future__ import annotations

from baton_engine.config.speculative import SpeculativeConfig
from baton_engine.speculation.drafter import Drafter
from baton_engine.speculation.lookup import PromptLookup, SuffixLookup
from baton_engine.speculation.proposer import Proposer


def make_drafter(text: str | None, vocab_size: int, *, overlap: bool = False) -> Drafter | None:
    """None without a config. Raises SettingsError."""
    if text is None:
        return None
    config = SpeculativeConfig.parse(text)
    most = config.num_speculative_tokens
    return Drafter(_lookup(config), most, vocab_size, overlap=overlap)


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
        case "grammar":
            return None
