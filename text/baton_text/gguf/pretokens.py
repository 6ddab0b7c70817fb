"""How a text is split before byte-level BPE, by the name in tokenizer.ggml.pre.

Files have no regular expressions, only names for them. Source: the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Pretokens:
    """`pattern` is that of the parts; without one, it is GPT-2's. With `digits`, each digit is a
    part before that. With `whole`, a part that is a token is not merged from smaller ones. With
    `composed`, the text has Unicode's composed form. `bos` says whether a text begins with BOS if
    the file does not say it."""

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    composed: bool = False
    bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composed else None

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        levels: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            levels.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is None:
            levels.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
        else:
            levels.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
            levels.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return levels[0] if len(levels) == 1 else pre_tokenizers.Sequence(levels)


GPT2 = Pretokens()
SMOLLM = Pretokens(digits=True)
LLAMA3 = Pretokens(rf"{WORDS}|\p{{N}}{{1,3}}|{REST}", whole=True, bos=True)
QWEN2 = Pretokens(rf"{WORDS}|\p{{N}}|{REST}", composed=True)
TEKKEN = Pretokens(rf"{CASED}|\p{{N}}|{CASED_REST}", whole=True, bos=True)
PRETOKENS: Mapping[str, Pretokens] = {
    "deepseek-r1-qwen": QWEN2,
    "gpt-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "smollm": SMOLLM,
    "tekken": TEKKEN,
}
