"""Sampling defaults from a model's generation_config.json.

As in vLLM, the values apply to fields that a request leaves unset, and do_sample is ignored
(a request disables sampling with temperature 0).
"""

from __future__ import annotations

from collections.abc import Mapping

from baton_text.artifacts import GENERATION_CONFIG, ArtifactError, load_json

# generation_config.json's name -> SamplingParams' name
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
MOST = 2**31
_COUNTS = ("top_k", "max_tokens")


def generation_defaults(artifacts: Mapping[str, bytes]) -> dict[str, float | int]:
    """The SamplingParams fields that generation_config.json sets, by name.

    Raise ArtifactError for a value that is not a number or exceeds MOST."""
    config = load_json(artifacts, GENERATION_CONFIG)
    fields: dict[str, float | int] = {}
    for theirs, ours in _NAMES.items():
        value = config.get(theirs)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArtifactError(f"{GENERATION_CONFIG}: {theirs} is {value!r}, not a number")
        if not abs(value) <= MOST:  # also False for NaN
            raise ArtifactError(f"{GENERATION_CONFIG}: {theirs} is {value!r}")
        fields[ours] = int(value) if ours in _COUNTS else float(value)
    return fields
