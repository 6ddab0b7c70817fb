"""SpeculativeConfig: which drafts an engine makes (`--speculative-config`), read from JSON.

In: the flag's text, with vLLM's names of keys. Out: checked values. Imports no torch.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from baton_engine.errors import SettingsError
from baton_protocol.policies import METHODS_WITH_FOLDER, Quantization, SpeculativeMethod

FLAG = "--speculative-config"
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
Count = Annotated[int, Meta(ge=1, le=64)]
# Those of SpeculativeMethod that take hidden states of the target.
HeadMethod = Literal["eagle", "eagle3", "medusa", "mtp"]
HEADS: tuple[HeadMethod, ...] = get_args(HeadMethod)
Share = Annotated[float, Meta(ge=0, le=1)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What drafts are made of, and at most how many follow a sequence's last token.

    - "ngram": what followed the last occurrence of the last `prompt_lookup_min` to
      `prompt_lookup_max` tokens in the prompt and the answer.
    - "suffix": of all occurrences of the longest possible end of the sequence, the tokens that
      followed most often, while their estimated probability is at least
      `suffix_decoding_min_token_prob`; at most `suffix_decoding_max_spec_factor` times as many as
      the end has tokens, and ends have at most `suffix_decoding_max_tree_depth` tokens.
    - "grammar": no drafts but those of grammars.
    - "draft_model": what the model in the folder `model` generates. It has the same tokenizer, and
      its weights are rounded as `quantization` says (see --quantization), the head to 8 bits.
    - "eagle", "eagle3", "medusa": a head in the folder `model`, which was trained on hidden states
      of the target.
    - "mtp": the layer of the target's checkpoint that drafts tokens (multi-token prediction).

    In a choice with a grammar, the tokens that it allows alone are drafts with each method.
    """

    method: SpeculativeMethod
    num_speculative_tokens: Count = 4
    prompt_lookup_min: Count = 3
    prompt_lookup_max: Count = 5
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=1, le=1024)] = 24
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=64)] = 1.0
    suffix_decoding_min_token_prob: Share = 0.1
    model: str | None = None
    quantization: Quantization = "none"

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Raises SettingsError, which names the key and the value."""
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise SettingsError(
                f"{FLAG} {text} is no JSON: {error}; for example {EXAMPLE}"
            ) from None
        if not isinstance(value, dict):
            raise SettingsError(f"{FLAG} {text} is no JSON object; for example {EXAMPLE}")
        for key in value:
            if key not in cls.__struct_fields__:
                raise SettingsError(f"{FLAG} has the unknown key {key}; {_near(key)}")
        try:
            config = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise SettingsError(f"{FLAG} {text}: {error}; for example {EXAMPLE}") from None
        config.check()
        return config

    @property
    def head(self) -> HeadMethod | None:
        """The method, if it is a head that takes hidden states of the target."""
        return next((method for method in HEADS if method == self.method), None)

    @property
    def needs_weights(self) -> bool:
        """Whether drafts come from a model or a head."""
        return self.method in METHODS_WITH_FOLDER or self.head is not None

    def check(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise SettingsError(
                f"{FLAG}: prompt_lookup_min {self.prompt_lookup_min} is larger than"
                f" prompt_lookup_max {self.prompt_lookup_max}"
            )
        if self.method in METHODS_WITH_FOLDER and not self.model:
            raise SettingsError(
                f"{FLAG}: {self.method} needs a model, the folder of the one to use"
            )
        if self.method not in METHODS_WITH_FOLDER and self.model is not None:
            raise SettingsError(f"{FLAG}: {self.method} has no use for the model {self.model}")
        if self.method != "draft_model" and self.quantization != "none":
            raise SettingsError(
                f"{FLAG}: {self.method} has no weights for the quantization {self.quantization}"
            )


def _near(key: Any) -> str:
    names = SpeculativeConfig.__struct_fields__
    close = get_close_matches(key, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}"
