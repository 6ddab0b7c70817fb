"""Parsing a model's source as users write it, and the folder for a downloaded model."""

from __future__ import annotations

import pytest

from baton_protocol.model_source import (
    ClaimFolder,
    HubModel,
    SourceError,
    parse_source,
)


@pytest.mark.parametrize(
    ("text", "repository", "revision", "folder"),
    [
        ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "", "Qwen--Qwen3-0.6B"),
        ("hf://gpt2", "gpt2", "", "gpt2"),
        ("hf://org/m@v1.0", "org/m", "v1.0", "org--m@v1.0"),
        ("hf://org/m@refs/pr/1", "org/m", "refs/pr/1", "org--m@refs--pr--1"),
    ],
)
def test_a_hub_repository_gets_one_folder_per_revision(
    text: str, repository: str, revision: str, folder: str
) -> None:
    source = parse_source(text)
    assert source == HubModel(repository=repository, revision=revision)
    assert source.folder_name == folder
    assert str(source) == text
    assert source.name == repository


@pytest.mark.parametrize(
    ("text", "claim", "folder", "name"),
    [
        ("pvc://models", "models", "", "models"),
        ("pvc://models/", "models", "", "models"),
        ("pvc://models/qwen/0.6B/", "models", "qwen/0.6B", "0.6B"),
    ],
)
def test_a_claim_source_has_a_claim_and_a_folder(
    text: str, claim: str, folder: str, name: str
) -> None:
    source = parse_source(text)
    assert source == ClaimFolder(claim=claim, folder=folder)
    assert str(source) == text.rstrip("/")
    assert source.name == name


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "hf://ORG/NAME"),
        ("s3://bucket/model", "'s3://bucket/model'"),
        ("/models/qwen", "pvc://CLAIM/FOLDER"),
        ("hf://", "''"),
        ("hf://a/b/c", "'a/b/c'"),
        ("hf://org/", "'org/'"),
        ("hf://../etc", "'../etc'"),
        ("hf://org/a--b", "'org/a--b'"),
        ("hf://org/.hidden", "'org/.hidden'"),
        ("hf://org/m?x=1", "'org/m?x=1'"),
        (f"hf://org/{'m' * 100}", "is not a valid repository"),
        ("hf://org/m@", "''"),
        ("hf://org/m@a--b", "'a--b'"),
        ("hf://org/m@../x", "'../x'"),
        ("hf://org/m\n", "is not a valid repository"),
        ("pvc://", "''"),
        ("pvc://Models/x", "'Models'"),
        ("pvc://models/../x", "'../x'"),
        ("pvc://models//x", "'/x'"),
        ("pvc://models/a\nb", "is not a valid folder"),
    ],
)
def test_the_error_for_a_bad_source_quotes_it_and_says_what_to_write(text: str, named: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse_source(text)
    message = str(caught.value)
    assert repr(text) in message
    assert named in message
    assert "write " in message
