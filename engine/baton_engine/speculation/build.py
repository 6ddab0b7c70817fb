"""Make the drafter of an engine from its `--speculative-config`."""

from __future__ import annotations

from baton_engine.config.speculative import FLAG, SpeculativeConfig
from baton_engine.errors import SettingsError
from baton_engine.speculation.drafter import Drafter
from baton_engine.speculation.forced import ForcedTokens
from baton_engine.speculation.lookup import PromptLookup, SuffixLookup
from baton_engine.speculation.proposer import Proposer


def make_drafter(text: str | None, vocab_size: int, head: Proposer | None = None) -> Drafter | None:
    """None without a config. `head` is the proposer of a method that takes hidden states, if the
    engine has them. Raises SettingsError."""
    if text is None:
        return None
    config = SpeculativeConfig.parse(text)
    if config.head is not None and head is None:
        raise SettingsError(
            f"{FLAG}: method {config.method} needs a model's hidden states, and the simulated"
            " engine has none; use ngram, suffix or grammar"
        )
    others = _lookup(config) if head is None else head
    return Drafter(ForcedTokens(others), config.num_speculative_tokens, vocab_size)


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
