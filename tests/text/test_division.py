"""Encoding a long text in parts gives the same ids as encoding it whole."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from baton_text.artifacts import TOKENIZER, byte_artifacts
from baton_text.division import division_of
from baton_text.tokenizer import PART, TextTooLong, Tokenizer
from tests.support.engines.text_models import (
    artifacts_of,
    byte_level_artifacts,
    metaspace_artifacts,
    metaspace_decoder_artifacts,
)

Artifacts = dict[str, bytes]
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERNS = {
    "llama-3": (
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen": (
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def of_backend(change: Callable[[Backend], None], base: Artifacts) -> Artifacts:
    backend = Backend.from_str(base[TOKENIZER].decode())
    change(backend)
    return artifacts_of(backend, "")


def with_patterns(*patterns: str, use_regex: bool = False, nfc: bool = False) -> Artifacts:
    def change(backend: Backend) -> None:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
        if nfc:
            backend.normalizer = normalizers.NFC()

    return of_backend(change, byte_level_artifacts())


def smollm() -> Artifacts:
    def change(backend: Backend) -> None:
        digits = pre_tokenizers.Digits(individual_digits=True)
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, level])

    return of_backend(change, byte_level_artifacts())


def prefixed() -> Artifacts:
    def change(backend: Backend) -> None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)

    return of_backend(change, byte_level_artifacts())


def gemma() -> Artifacts:
    """Marks by the normalizer, none before the text, and a split that finds no space."""

    def change(backend: Backend) -> None:
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")

    return of_backend(change, metaspace_artifacts())


def with_bos_and_eos(base: Artifacts) -> Artifacts:
    def change(backend: Backend) -> None:
        pairs = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=pairs
        )

    return of_backend(change, base)


def crossing() -> Artifacts:
    """A vocabulary with a token that crosses from one word to the next."""
    base = json.loads(metaspace_artifacts()[TOKENIZER])
    vocab, merges = base["model"]["vocab"], base["model"]["merges"]
    for left, right in (("e", "\u2581"), ("e\u2581", "q")):
        vocab[left + right] = len(vocab)
        merges.insert(0, [left, right])
    return artifacts_of(Backend.from_str(json.dumps(base)), "")


DIVIDED: dict[str, Callable[[], Artifacts]] = {
    "bytes": byte_artifacts,
    "gpt-2": byte_level_artifacts,
    "gpt-2, prefix space": prefixed,
    "smollm": smollm,
    "qwen, NFC": lambda: with_patterns(PATTERNS["qwen"], nfc=True),
    "llama-3": lambda: with_patterns(PATTERNS["llama-3"]),
    "llama-3, BOS and EOS": lambda: with_bos_and_eos(with_patterns(PATTERNS["llama-3"])),
    "gpt-4o": lambda: with_patterns(PATTERNS["gpt-4o"]),
    "deepseek": lambda: with_patterns(*DEEPSEEK),
    "llama-2": metaspace_artifacts,
    "llama-2, BOS and EOS": lambda: with_bos_and_eos(metaspace_artifacts()),
    "llama-2, a token across words": crossing,
    "metaspace": metaspace_decoder_artifacts,
    "gemma": gemma,
}
# What texts are made of: words, runs of spaces and lines, digits, signs, marks that combine,
# apostrophes at a word's end, characters of all sizes, special tokens and parts of them.
ATOMS = (
    *(
        "the",
        "quick",
        "brown",
        "x",
        "I'll",
        "we'Re",
        "don't",
        "'s",
        "'",
        "stop",
        "STOP",
        "CamelCase",
    ),
    *(
        " ",
        " ",
        " ",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        " \n",
        "\n ",
        "\t",
        "\r\n",
        "\u00a0",
        "\u3000",
    ),
    *(
        "1",
        "22",
        "333",
        "4444",
        "12345",
        "1.5",
        ".",
        ",",
        "...",
        "!?",
        "()",
        "- /",
        "//",
        "_",
        "\u00a3",
    ),
    *(
        "\u65e5\u672c\u8a9e",
        "\u3001",
        "\uff0c",
        "Gr\u00fc\u00dfe",
        "e\u0301",
        "\u0301",
        "\u200d",
        "\x00",
        "\x1c",
    ),
    *(
        "\U0001f469\u200d\U0001f4bb",
        "\u2581",
        "\u2581the",
        "\u0435\u0436",
        "\u0905\u0902",
        "\u00b2",
        "\u2167",
    ),
    *("<s>", "</s>", "<|user|>", "<", "s>", "e q", "e  q", "e\u2581q"),
)


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    made = []
    for _ in range(150):
        few = rng.sample(ATOMS, rng.randint(2, len(ATOMS)))
        made.append("".join(rng.choices(few, k=rng.randint(1, 120))))
    return made


def library_of(tokenizer: Tokenizer) -> Backend:
    """The library's own tokenizer, which encodes each text whole."""
    return Backend.from_str(tokenizer.to_json())


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize(
    "size", [7, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 64))]
)
def test_the_ids_of_the_parts_are_the_ids_of_the_whole(name: str, size: int) -> None:
    tokenizer = Tokenizer.from_artifacts(DIVIDED[name]())
    library, divided = library_of(tokenizer), 0
    for text in texts(size):
        for special in (True, False):
            whole = library.encode(text, add_special_tokens=special).ids
            found = tokenizer.encode_up_to(text, len(whole), special, part_size=size)
            assert found == (whole, True), (text, whole, found)
            for most in (1, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 3):
                if most > 0:
                    last = tokenizer.encode_last(text, most, special, part_size=size)
                    assert last == whole[-most:], (text, most)
        assert tokenizer.division is not None
        divided += len(list(tokenizer.division.parts(text, size))) > 1
    assert divided > 20, "hardly any text was divided"


def test_texts_of_every_real_tokenizer_are_divided_exactly(artifacts: Artifacts) -> None:
    tokenizer = Tokenizer.from_artifacts(artifacts)
    assert tokenizer.division is not None
    library = library_of(tokenizer)
    for text in texts(5):
        whole = library.encode(text).ids
        assert tokenizer.encode_up_to(text, len(whole), part_size=20) == (whole, True)


@pytest.mark.parametrize("name", DIVIDED)
def test_encoding_stops_early_above_the_maximum_number_of_tokens(name: str) -> None:
    tokenizer = Tokenizer.from_artifacts(DIVIDED[name]())
    text = "the quick brown " * (20 * PART // 16)
    ids, whole = tokenizer.encode_up_to(text, 1000)
    assert not whole
    assert 1000 < len(ids) <= PART + 1001
    assert ids == library_of(tokenizer).encode(text[: 2 * PART]).ids[: len(ids)]


@pytest.mark.parametrize("name", DIVIDED)
def test_the_last_tokens_of_a_long_text_are_encoded_without_the_rest(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_artifacts(DIVIDED[name]())
    text = "the quick brown " * (4 * PART // 16) + "STOP here"
    whole, encoded = tokenizer.encode(text), 0
    encode = tokenizer.encode

    def counted(part: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal encoded
        encoded += len(part)
        return encode(part, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", counted)
    assert tokenizer.encode_last(text, 100) == whole[-100:]
    assert encoded <= 2 * PART


def not_divided(change: Callable[[dict[str, Any]], None], base: Artifacts) -> Backend:
    raw = json.loads(base[TOKENIZER])
    change(raw)
    return Backend.from_str(json.dumps(raw))


def set_pattern(raw: dict[str, Any], pattern: str) -> None:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    level = raw["pre_tokenizer"] | {"use_regex": False}
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}


UNDIVIDED: dict[str, Callable[[], Backend]] = {
    "an unknown pattern": lambda: not_divided(
        lambda raw: set_pattern(raw, r"\w+ \w+|\s+|."), byte_level_artifacts()
    ),
    "a pattern that looks behind": lambda: not_divided(
        lambda raw: set_pattern(raw, r"(?<= )\p{L}+|\s+"), byte_level_artifacts()
    ),
    "no pattern": lambda: not_divided(
        lambda raw: raw["pre_tokenizer"].update(use_regex=False), byte_level_artifacts()
    ),
    "dropout": lambda: not_divided(
        lambda raw: raw["model"].update(dropout=0.1), byte_level_artifacts()
    ),
    "a special token that takes space": lambda: not_divided(
        lambda raw: raw["added_tokens"][2].update(rstrip=True), byte_level_artifacts()
    ),
    "another normalizer": lambda: not_divided(
        lambda raw: raw.update(normalizer={"type": "Lowercase"}), byte_level_artifacts()
    ),
    "Unigram": lambda: Backend(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.0)], unk_id=0)),
}


@pytest.mark.parametrize("name", UNDIVIDED)
def test_a_tokenizer_that_may_look_across_a_place_is_not_divided(name: str) -> None:
    backend = UNDIVIDED[name]()
    assert division_of(backend) is None
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_artifacts({TOKENIZER: backend.to_str().encode()})
    with pytest.raises(TextTooLong):
        tokenizer.encode_up_to("a b " * (1 << 19), 10)
    with pytest.raises(TextTooLong):
        tokenizer.encode_last("a b " * (1 << 19), 10)


def test_an_indivisible_text_above_the_limit_raises_text_too_long() -> None:
    tokenizer = Tokenizer.from_artifacts(byte_level_artifacts())
    with pytest.raises(TextTooLong) as caught:
        tokenizer.encode_up_to("a b " + "x" * (1 << 20), 1 << 30)
    assert caught.value.args[0] > 1 << 20


@pytest.mark.parametrize("name", DIVIDED)
def test_no_text_has_more_characters_per_token_than_the_longest(name: str) -> None:
    tokenizer = Tokenizer.from_artifacts(DIVIDED[name]())
    for text in [*texts(3), "<|assistant|>" * 50, " " * 100, "\u2581" * 50]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(text) <= len(ids) * tokenizer.longest_token


def test_a_special_token_may_be_the_longest() -> None:
    def change(backend: Backend) -> None:
        backend.add_special_tokens([AddedToken("<|" + "long" * 50 + "|>", special=True)])

    tokenizer = Tokenizer.from_artifacts(of_backend(change, byte_level_artifacts()))
    assert tokenizer.longest_token == 204
