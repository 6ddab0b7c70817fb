"""Add token texts to log-probabilities.

In: PositionLogprobs from an engine, which knows only ids. Out: the same with `text` and `raw` set
for each candidate.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_text.tokenizer import Tokenizer


def add_token_texts(
    tokenizer: Tokenizer, positions: Iterable[PositionLogprobs]
) -> tuple[PositionLogprobs, ...]:
    """The same logprobs with `text` and `raw` set for each candidate."""
    # A long prompt has many candidates but few distinct ids.
    names: dict[int, tuple[str, bytes]] = {}

    def name(candidate: TokenLogprob) -> TokenLogprob:
        text = names.get(candidate.id)
        if text is None:
            text = (tokenizer.token_text(candidate.id), tokenizer.token_bytes(candidate.id))
            names[candidate.id] = text
        return TokenLogprob(candidate.id, candidate.logprob, candidate.rank, *text)

    return tuple(
        PositionLogprobs(
            name(position.sampled), tuple(map(name, position.top)), tuple(map(name, position.named))
        )
        for position in positions
    )
