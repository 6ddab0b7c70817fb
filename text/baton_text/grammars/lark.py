"""Write literal text and free text as Lark rules for one tokenizer.

In llguidance, text never matches an added token (a special one, or one of the form <...>); a
grammar names such a token by its id. Lark writes a marker as a token or as text, depending on the
model's tokenizer.

    Lark   writes literal text, and free text in which triggers start a structure
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from baton_text.tokenizer import Tokenizer


class Lark:
    """Writes Lark for one tokenizer. Without a tokenizer, everything is text."""

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

    @property
    def ids(self) -> Collection[int]:
        """The ids that text never matches."""
        return self._tokens.values()

    def is_token(self, text: str) -> bool:
        return text in self._tokens

    def leading_token(self, text: str) -> str:
        """The text of the added token that `text` starts with; empty if there is none."""
        match = self._token.match(text)
        return match.group() if match else ""

    def has_token(self, text: str) -> bool:
        """Whether `text` contains an added token."""
        return self._token.search(text) is not None

    def text(self, text: str) -> str:
        """Exactly this text, its added tokens written as ids; empty for empty text."""
        written, at = list[str](), 0
        for match in self._token.finditer(text):
            written += [_quoted(text[at : match.start()]), f"<[{self._tokens[match.group()]}]>"]
            at = match.end()
        return " ".join(filter(None, [*written, _quoted(text[at:])]))

    def any_token(self, *without: str) -> str:
        """Any one token except EOS and the tokens in `without`."""
        ids = self._eos.union(self._tokens[text] for text in without if text in self._tokens)
        return f"<[^{_ranges(sorted(ids))}]>" if ids else "<[*]>"

    def free_text(self, opening: str = "", triggers: Collection[str] = ()) -> list[str]:
        """Rules for free text, which is `free*`.

        free    a piece of text, or an added token other than `opening` and `triggers`
        SOME    a piece of text that does not start with `opening`
        ANY     like SOME, or empty
        """
        taken = self._eos.union(self._tokens.get(text, -1) for text in (opening, *triggers))
        kept = sorted(set(self._tokens.values()) - taken)
        but = " & ~OPENED" if opening else ""
        return [
            f"free: SOME | <[{_ranges(kept)}]>" if kept else "free: SOME",
            f"SOME: /(?s:.+)/{but}",
            f"ANY: /(?s:.*)/{but}",
            *([f"OPENED: {_quoted(opening)} /(?s:.*)/"] if opening else []),
        ]

    def clean_text(
        self, without: Sequence[str], *, start: str = "", opening: str = ""
    ) -> list[str]:
        """Rules for `clean`: text, maybe empty, that contains none of the texts `without`, neither
        as tokens nor as text.

        `start`: a regex for its first characters, after white space. `opening`: see free_text."""
        taken = self._eos.union(self._tokens.get(text, -1) for text in (opening, *without))
        kept = sorted(set(self._tokens.values()) - taken)
        some = f"/(?s:.+)/ & {self.excluding(*without)}"
        first = rf" & /(?s:\s*{start}.*)/" if start else ""
        first += " & ~OPENED" if opening else ""
        # No two pieces adjoin: together they might contain what each of them does not.
        more = f"(<[{_ranges(kept)}]> CLEAN?)*" if kept else ""
        # With a `start`, the first piece may not be a token.
        begin = f"(FIRST {more})?" if start else f"FIRST? {more}"
        return [
            f"clean: {begin}",
            f"FIRST: {some}{first}",
            f"CLEAN: {some}",
            *([f"OPENED: {_quoted(opening)} /(?s:.*)/"] if opening else []),
        ]

    def excluding(self, *texts: str) -> str:
        """A regex in Lark for any text that contains none of `texts`."""
        if not texts:
            return "/(?s:.*)/"
        return f"/(?s:.*)/ & ~(/(?s:.*)/ ({' | '.join(map(_quoted, texts))}) /(?s:.*)/)"

    def tagged(
        self, tags: Sequence[tuple[str, str]], *, many: bool = True, opening: str = ""
    ) -> list[str]:
        """Rules for `tagged`: free text in which each trigger must be followed by a structure.

        `tags` are pairs of a trigger and the Lark expression that follows it. Unless `many`, the
        first structure ends the answer. `opening`: see free_text.

        If a trigger starts with an added token, that token alone triggers the structure. The same
        text without the token does so too, because a parser sees only text.
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
