"""Texts and free text of one tokenizer, written in Lark.

llguidance keeps added tokens (special ones, and those of the form <...>) apart from text: text
never matches such a token, and a token is written by its id. What stands here turns a marker into
whatever it is for the model.

    Lark   writes texts, and free text in which triggers begin something; for one tokenizer or none
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from baton_text.tokenizer import Tokenizer


class Lark:
    """Without a tokenizer, all is text."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._eos = frozenset(tokenizer.eos_ids) if tokenizer else frozenset[int]()
        self._tokens: dict[str, int] = {}
        if tokenizer:
            special = tokenizer.special_ids
            self._tokens = {
                text: index
                for text, index in tokenizer.added_tokens.items()
                if index in special or (text.startswith("<") and text.endswith(">"))
            }
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def is_token(self, text: str) -> bool:
        return text in self._tokens

    def leading_token(self, text: str) -> str:
        """The token that the text begins with, as text; empty if there is none."""
        found = self._token.match(text)
        return found.group() if found else ""

    def has_token(self, text: str) -> bool:
        """Whether there is one in the text."""
        return self._token.search(text) is not None

    def text(self, text: str) -> str:
        """Exactly this text, with its tokens as tokens; empty for no text."""
        written, at = list[str](), 0
        for found in self._token.finditer(text):
            written += [_quoted(text[at : found.start()]), f"<[{self._tokens[found.group()]}]>"]
            at = found.end()
        return " ".join(filter(None, [*written, _quoted(text[at:])]))

    def any_token(self, *without: str) -> str:
        """One token of whatever kind, but no end of the answer and none of these."""
        ids = self._eos.union(self._tokens[text] for text in without if text in self._tokens)
        return f"<[^{_ranges(sorted(ids))}]>" if ids else "<[*]>"

    def free_text(self, opening: str = "", triggers: Collection[str] = ()) -> list[str]:
        """Rules, of which `free` is a piece of text or a token that no text matches, to be
        repeated. SOME is such a piece, ANY may be empty, too. No piece begins with `opening`, and
        none is a token of `opening` and `triggers`."""
        taken = self._eos.union(self._tokens.get(text, -1) for text in (opening, *triggers))
        kept = sorted(set(self._tokens.values()) - taken)
        but = " & ~OPENED" if opening else ""
        return [
            f"free: SOME | <[{_ranges(kept)}]>" if kept else "free: SOME",
            f"SOME: /(?s:.+)/{but}",
            f"ANY: /(?s:.*)/{but}",
            *([f"OPENED: {_quoted(opening)} /(?s:.*)/"] if opening else []),
        ]

    def tagged(
        self, tags: Sequence[tuple[str, str]], *, many: bool = True, opening: str = ""
    ) -> list[str]:
        """Rules, of which `tagged` is free text in which each trigger begins what stands beside it,
        in Lark: `tags` are (trigger, what follows). Not `many`: the first one ends the answer.
        `opening`: see free_text.

        A trigger that begins with a token begins at that token. It is seen as text, too, since a
        reader of the text cannot tell.
        """
        tokens = [self.leading_token(trigger) for trigger, _ in tags]
        rules = self.free_text(opening, tokens)
        for number, ((trigger, follows), token) in enumerate(zip(tags, tokens, strict=True)):
            begin = f"begin_{number}"
            rules.append(f"{begin}[lazy]: ANY {_quoted(token or trigger)}")
            if token:
                begin = f"({begin} | {self.text(token)}) {self.text(trigger[len(token) :])}"
            rules.append(f"tag_{number}: {begin} {follows}")
        any_tag = " | ".join(f"tag_{number}" for number in range(len(tags)))
        return [f"tagged: (free | {any_tag})*" if many else f"tagged: free* ({any_tag})?", *rules]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _ranges(ids: Sequence[int]) -> str:
    """Ascending ids, as "1,3-5"."""
    runs: list[tuple[int, int]] = []
    for index in ids:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = runs[-1][0], index
        else:
            runs.append((index, index))
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
