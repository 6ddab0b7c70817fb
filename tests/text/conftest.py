"""Fixtures: each tokenizer, loaded by baton_text and by transformers from the same files."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from baton_text.artifacts import read_artifacts
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import FAMILIES, LOSSLESS, tokenizer_of, write_artifacts

AutoTokenizer = Callable[[Path], Any]


@pytest.fixture(scope="session")
def hugging_face() -> AutoTokenizer:
    """AutoTokenizer of a folder, loaded once (transformers is imported here and nowhere in
    baton_text)."""
    from transformers import AutoTokenizer as Theirs

    return lru_cache(lambda folder: Theirs.from_pretrained(folder))


@pytest.fixture(scope="session")
def our_tokenizer() -> Callable[[Path], Tokenizer]:
    """Our tokenizer of a folder, loaded once."""
    return lru_cache(lambda folder: Tokenizer.from_artifacts(read_artifacts(folder)))


@pytest.fixture(scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """The tokenizer of the family that the parameter names."""
    return tokenizer_of(request.param)


@pytest.fixture(params=[*LOSSLESS, "demo"], scope="session")
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer; the demo model's where its package is installed."""
    if request.param == "demo":
        folder: Path = request.getfixturevalue("demo_model")
        return folder
    return write_artifacts(FAMILIES[request.param](), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def artifacts(model_folder: Path) -> dict[str, bytes]:
    return read_artifacts(model_folder)
