from __future__ import annotations

import re

import pytest

from baton_engine.config.speculative import SpeculativeConfig
from baton_engine.errors import SettingsError


def test_a_config_has_defaults() -> None:
    config = SpeculativeConfig.parse('{"method": "ngram"}')
    assert (config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max) == (
        *(4, 3, 5),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "ngram is no JSON"),
        ("[]", "is no JSON object"),
        ("{}", "missing required field `method`"),
        ('{"method": "eagle9"}', "Invalid enum value 'eagle9'"),
        ('{"method": "ngram", "num_speculativ_tokens": 2}', "did you mean num_speculative_tokens?"),
        ('{"method": "ngram", "x": 2}', "unknown key x; known keys: method"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "`int` >= 1"),
        ('{"method": "ngram", "num_speculative_tokens": 65}', "`int` <= 64"),
        ('{"method": "ngram", "num_speculative_tokens": "4"}', "Expected `int`, got `str`"),
        ('{"method": "ngram", "prompt_lookup_max": 2}', "prompt_lookup_min 3 is larger than"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 2}', "`float` <= 1"),
        ('{"method": "eagle"}', "eagle needs a model, the folder of the one to use"),
        ('{"method": "medusa", "models": "/m"}', "did you mean model?"),
        ('{"method": "mtp", "model": "/m"}', "mtp has no use for the model /m"),
        (
            '{"method": "eagle3", "model": "/m", "quantization": "int8"}',
            "eagle3 has no weights for",
        ),
        ('{"method": "draft_model"}', "draft_model needs a model, the folder"),
        ('{"method": "draft_model", "models": "/m"}', "did you mean model?"),
        ('{"method": "ngram", "model": "/m"}', "ngram has no use for the model /m"),
        ('{"method": "suffix", "quantization": "int4"}', "suffix has no weights for the quantiz"),
        ('{"method": "draft_model", "model": "/m", "quantization": "int3"}', "Invalid enum value"),
    ],
)
def test_an_invalid_config_is_refused_by_key_and_value(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        SpeculativeConfig.parse(text)
