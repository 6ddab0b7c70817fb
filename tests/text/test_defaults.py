"""Sampling defaults of generation_config.json."""

from __future__ import annotations

import json

import pytest

from baton_protocol.sampling import SamplingParams
from baton_text.artifacts import GENERATION_CONFIG, ArtifactError
from baton_text.defaults import generation_defaults


def test_values_become_fields_of_sampling_params_and_do_sample_is_ignored() -> None:
    config = {
        "do_sample": False,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": None,
        "max_new_tokens": 64,
        "eos_token_id": [1, 2],
        "repetition_penalty": 1.1,
    }
    defaults = generation_defaults({GENERATION_CONFIG: json.dumps(config).encode()})
    assert defaults == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "max_tokens": 64,
    }
    SamplingParams(**defaults).check()  # type: ignore[arg-type]


def test_a_model_without_the_file_has_no_defaults() -> None:
    assert generation_defaults({}) == {}


def test_the_error_names_a_value_that_is_not_a_number() -> None:
    with pytest.raises(ArtifactError, match="temperature is 'hot'"):
        generation_defaults({GENERATION_CONFIG: b'{"temperature": "hot"}'})


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1e300"])
@pytest.mark.parametrize("name", ["temperature", "top_k", "max_new_tokens"])
def test_the_error_names_a_value_out_of_range(name: str, value: str) -> None:
    with pytest.raises(ArtifactError, match=name):
        generation_defaults({GENERATION_CONFIG: f'{{"{name}": {value}}}'.encode()})
