"""Small tokenizers built on the spot, as artifacts and as folders that transformers reads.

In: nothing. Out: artifacts of a byte-level BPE (as Llama 3 and Qwen have), of a Metaspace one with
byte fallback (as Llama 2 and Mistral have), of a Unigram (as XLM and T5 have), of a WordPiece (as
BERT's have), and the folder form of any artifacts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from baton_text.artifacts import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    byte_artifacts,
)
from baton_text.tokenizer import Tokenizer

CORPUS = (
    "The quick brown fox jumps over the lazy dog. STOP here, or stop there; the end of the line.\n"
    "def main(args):\n    return {'key': [1, 2, 33], \"text\": None}\n\n",
    "Gr\u00fc\u00dfe aus K\u00f6ln, \u65e5\u672c\u8a9e\u306e\u6587\u7ae0.",
)
VALUES = ("1", "null", "true", '"a"', '"b\\u0061"', "[1,2]", '{"a":1}', '""')
SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
CHATML = (
    "{% for message in messages %}<|user|>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_artifacts(template: str = CHATML) -> dict[str, bytes]:
    """A byte-level BPE of 400 entries; emoji and most CJK characters take several tokens."""
    return artifacts_of(_byte_level(), template)


@functools.cache
def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@functools.cache
def json_tokenizer() -> Tokenizer:
    """A byte-level BPE of 900 entries whose tokens cross the signs of JSON, such as `{"a":` and
    `,"b`."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs = [f'"{key}":{value}' for key in ("a", "b", "ab", "x_1", "c") for value in VALUES]
    texts = [f"{{{one},{two}}}" for one in pairs for two in pairs]
    backend.train_from_iterator(texts, trainer)
    return Tokenizer.from_artifacts(artifacts_of(backend, CHATML))


def metaspace_artifacts(template: str = CHATML) -> dict[str, bytes]:
    """Spaces as U+2581, unknown characters as byte tokens, the leading space stripped."""
    backend = _with_bytes()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return artifacts_of(backend, template)


def metaspace_decoder_artifacts() -> dict[str, bytes]:
    """The same vocabulary with tokenizers' Metaspace as pre-tokenizer and as decoder."""
    backend = _with_bytes()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
    return artifacts_of(backend, CHATML)


def unigram_artifacts() -> dict[str, bytes]:
    """A Unigram with Metaspace as pre-tokenizer and decoder; unknown characters become <unk>."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        unk_token="<unk>",
        special_tokens=[AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return artifacts_of(backend, CHATML)


def wordpiece_artifacts() -> dict[str, bytes]:
    """A WordPiece: words are split at spaces and punctuation, `##` continues a word."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=160,
        special_tokens=[AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")],
        continuing_subword_prefix="##",
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return artifacts_of(backend, CHATML)


def _with_bytes() -> Backend:
    words = ["the", "quick", "brown", "stop", "STOP", "line", "\u65e5\u672c", "end"]
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges: list[tuple[str, str]] = []
    for char in ["\u2581", *"abcdefghijklmnopqrstuvwxyzSTOP.,;:!?0123456789\u65e5\u672c\u00fc"]:
        vocab.setdefault(char, len(vocab))
    for word in ["\u2581" + text for text in words] + words:
        for length in range(2, len(word) + 1):
            if word[:length] not in vocab:
                vocab[word[:length]] = len(vocab)
                merges.append((word[: length - 1], word[length - 1]))
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    backend = Backend(model)
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return backend


def artifacts_of(backend: Backend, template: str) -> dict[str, bytes]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    eos = backend.token_to_id("</s>")
    return {
        TOKENIZER: backend.to_str().encode(),
        TOKENIZER_CONFIG: json.dumps(config).encode(),
        GENERATION_CONFIG: json.dumps({"eos_token_id": [eos]}).encode(),
        CHAT_TEMPLATE: template.encode(),
    }


def write_artifacts(artifacts: Mapping[str, bytes], folder: Path) -> Path:
    """Write artifacts to a folder that AutoTokenizer can read."""
    for name, data in artifacts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


# One tokenizer of each family in use by causal language models.
FAMILIES: Mapping[str, Callable[[], dict[str, bytes]]] = {
    "bytes": byte_artifacts,
    "byte-level": byte_level_artifacts,
    "metaspace": metaspace_artifacts,
    "metaspace-decoder": metaspace_decoder_artifacts,
    "unigram": unigram_artifacts,
    "wordpiece": wordpiece_artifacts,
}
# The families that can encode every text.
LOSSLESS = ("bytes", "byte-level", "metaspace", "metaspace-decoder")


@functools.cache
def tokenizer_of(family: str) -> Tokenizer:
    """A test file that had one made where it is imported would start a trainer's threads there."""
    return Tokenizer.from_artifacts(FAMILIES[family]())
