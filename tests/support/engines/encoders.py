"""Folders of tiny encoders with random weights, saved by transformers, with a WordPiece tokenizer.

In: a kind of encoder. Out: the folder of one that embeds, or of a classifier.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.engines.tiny_models import TEXT

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, CLS, SEP, MASK = range(len(SPECIALS))
VOCAB = 200
POSITIONS = 130
STD = 0.2
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass(frozen=True)
class TinyEncoder:
    """`kind` is the model_type of a transformers config. `positions` are those that a text has."""

    kind: str
    values: dict[str, Any] = field(default_factory=lambda: dict(_SIZES))
    positions: int = POSITIONS


ENCODERS = {
    "bert": TinyEncoder("bert"),
    # Positions begin after that of padding.
    "roberta": TinyEncoder("roberta", _SIZES | {"type_vocab_size": 1}, POSITIONS - PAD - 1),
    "xlm-roberta": TinyEncoder("xlm-roberta", _SIZES | {"type_vocab_size": 1}, POSITIONS - PAD - 1),
    "distilbert": TinyEncoder(
        "distilbert", {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    ),
    # One layer of two with a window of 8 tokens to each side.
    "modernbert": TinyEncoder(
        "modernbert", _SIZES | {"local_attention": 16, "global_attn_every_n_layers": 2}
    ),
    "electra": TinyEncoder("electra", _SIZES | {"embedding_size": 16}),
    # Its attention is code of its own, with a bias by distance.
    "mpnet": TinyEncoder("mpnet", positions=POSITIONS - 2),
}


def encoder(
    folder: Path,
    name: str = "bert",
    *,
    classes: int = 0,
    auto: str = "",
    pooling: dict[str, Any] | None = None,
    **values: Any,
) -> Path:
    """With `classes`, a classifier. `auto` is the transformers class that saves the model.
    `pooling` is the config of a Pooling module of sentence-transformers; None: the folder has no
    modules. `values` are further ones of config.json."""
    import torch
    import transformers

    spec = ENCODERS[name]
    config = transformers.AutoConfig.for_model(
        spec.kind,
        **{
            "vocab_size": VOCAB,
            "max_position_embeddings": POSITIONS,
            "pad_token_id": PAD,
            "cls_token_id": CLS,
            "sep_token_id": SEP,
            **({"num_labels": classes} if classes else {}),
            **spec.values,
            **values,
        },
    )
    auto = auto or ("AutoModelForSequenceClassification" if classes else "AutoModel")
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    noise = torch.Generator().manual_seed(random.Random(name).getrandbits(32))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            norm = "norm" in key.lower() and key.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, STD, generator=noise)
    model.save_pretrained(folder)
    _save_tokenizer(folder, typed=name in ("bert", "electra"))
    if pooling is not None:
        kinds = ("Transformer", "Pooling")
        modules = [
            {"path": "" if place == 0 else "1_Pooling", "type": f"sentence_transformers.{kind}"}
            for place, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """[CLS], random ids, [SEP]: `length` in all, at least 2."""
    rng = random.Random(f"{length}/{seed}")
    return [CLS, *(rng.randrange(len(SPECIALS), VOCAB) for _ in range(length - 2)), SEP]


def _save_tokenizer(folder: Path, *, typed: bool) -> None:
    """`typed`: the second text of a pair has token type 1."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIALS[UNKNOWN]))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIALS), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    second = 1 if typed else 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair=f"[CLS]:0 $A:0 [SEP]:0 $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(
            zip(
                ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"),
                SPECIALS,
                strict=True,
            )
        ),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
