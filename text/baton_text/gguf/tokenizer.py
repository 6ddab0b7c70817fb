"""The tokenizer of a GGUF file, as the files of a Hugging Face folder.

In: metadata with the vocabulary. Out: the contents of tokenizer.json, tokenizer_config.json and
chat_template.jinja. Byte-level BPE has its merges in the file. A SentencePiece vocabulary has
scores: two pieces are merged in the order of the score of what they make.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from baton_text.gguf.header import GgufError
from baton_text.gguf.metadata import Metadata
from baton_text.gguf.pretokens import PRETOKENS

HERE = "tokenizer.ggml"
BPE, SENTENCE_PIECE = "gpt2", "llama"
# Types of tokens. Control tokens are never shown; both kinds are found anywhere in a text.
CONTROL, USER_DEFINED = 3, 4
SPACE = "\u2581"
# Name of a token in tokenizer_config.json -> its name in the file.
NAMED: Mapping[str, str] = {
    "bos_token": "bos",
    "eos_token": "eos",
    "pad_token": "padding",
    "unk_token": "unknown",
}


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """Content by file name. Raises GgufError."""
    tokens = metadata.texts(f"{HERE}.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        tokens = _distinct(tokens)
        vocab = {token: index for index, token in enumerate(tokens)}
    model = metadata.text(f"{HERE}.model")
    if model == BPE:
        tokenizer, bos = _byte_level(metadata, vocab)
    elif model == SENTENCE_PIECE:
        tokenizer, bos = _sentence_piece(metadata, vocab), True
    else:
        raise metadata.wrong(f"{HERE}.model", model, f"{BPE} or {SENTENCE_PIECE}")
    tokenizer.add_tokens(list(_added_tokens(metadata, tokens)))
    named = _named_tokens(metadata, tokens)
    if metadata.flag(f"{HERE}.add_bos_token", bos):
        _begin_with_bos(metadata, tokenizer, named, vocab)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
    }
    files = {"tokenizer.json": str(tokenizer.to_str()), "tokenizer_config.json": json.dumps(config)}
    template = metadata.text("tokenizer.chat_template")
    return files if template is None else {**files, "chat_template.jinja": template}


def _distinct(tokens: Sequence[str]) -> list[str]:
    """A token that is there twice has its first id. The others never occur in a text."""
    seen: set[str] = set()
    names = []
    for index, token in enumerate(tokens):
        names.append(f"{token}<duplicate {index}>" if token in seen else token)
        seen.add(token)
    return names


def _byte_level(metadata: Metadata, vocab: Mapping[str, int]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether its texts begin with BOS by default."""
    name = metadata.text(f"{HERE}.pre")
    if name is None or name not in PRETOKENS:
        raise metadata.wrong(f"{HERE}.pre", name, f"one of {', '.join(PRETOKENS)}")
    pretokens = PRETOKENS[name]
    merges = [_merge(metadata, merge, vocab) for merge in metadata.texts(f"{HERE}.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab=dict(vocab), merges=merges, ignore_merges=pretokens.whole)
    )
    if (normalizer := pretokens.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pretokens.splitter()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pretokens.bos


def _merge(metadata: Metadata, merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    # A part may be a space in some vocabularies, but never begins with one.
    left, space, right = merge.partition(" ")
    if not space or not {left, right, left + right} <= vocab.keys():
        expected = "two tokens that make a third, with a space between them"
        raise metadata.wrong(f"{HERE}.merges", merge, expected)
    return left, right


def _sentence_piece(metadata: Metadata, vocab: Mapping[str, int]) -> Tokenizer:
    scores = metadata.numbers(f"{HERE}.scores", len(vocab))
    unknown = _named_tokens(metadata, list(vocab)).get("unk_token", "<unk>")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocab),
            merges=_merges_by_score(vocab, scores),
            unk_token=unknown if unknown in vocab else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.flag(f"{HERE}.add_space_prefix", True)
    # A text, and what follows a special token, begins with a space.
    before = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best first. Of pairs that make the same one, that
    with the longest first token."""
    merges = []
    for token, index in vocab.items():
        parts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += [
            (-scores[index], -len(left), left, right)
            for left, right in parts
            if left in vocab and right in vocab
        ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _added_tokens(metadata: Metadata, tokens: Sequence[str]) -> Iterator[AddedToken]:
    kinds = metadata.numbers(f"{HERE}.token_type", len(tokens))
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED) and token:
            yield AddedToken(token, special=kind == CONTROL, normalized=False)


def _named_tokens(metadata: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    named = {}
    for name, key in NAMED.items():
        place = f"{HERE}.{key}_token_id"
        if place in metadata:
            index = metadata.integer(place, least=0)
            if index >= len(tokens):
                raise metadata.wrong(place, index, f"the id of one of {len(tokens)} tokens")
            named[name] = tokens[index]
    return named


def _begin_with_bos(
    metadata: Metadata, tokenizer: Tokenizer, named: Mapping[str, str], vocab: Mapping[str, int]
) -> None:
    bos = named.get("bos_token")
    if bos is None:
        raise GgufError(
            f"{metadata.header.path}: texts begin with BOS, and there is no {HERE}.bos_token_id"
        )
    if not bos or any(each in bos for each in " $:"):
        raise metadata.wrong(f"{HERE}.bos_token_id", bos, "a token without spaces, $ and :")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B:1",
        special_tokens=[(bos, vocab[bos])],
    )
