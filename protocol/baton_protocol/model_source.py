"""Where a model comes from when it is no folder yet, as a user writes it.

    hf://ORG/NAME[@REVISION]    a repository of a Hugging Face hub (ORG/ may be missing: hf://gpt2)
    pvc://CLAIM[/FOLDER]        a folder on a Kubernetes PersistentVolumeClaim

In: that text. Out: a `HubModel` or a `ClaimFolder`, or SourceError. No I/O: whether it exists is
found out by whoever fetches or mounts it. Both sides compute a fetched model's folder from here:
the command that fetches, and the manifests that name the folder to a node.
"""

from __future__ import annotations

import re

import msgspec

HUB_SCHEME = "hf://"
CLAIM_SCHEME = "pvc://"
# What the hub itself allows: words of letters, digits, '_', '-' and '.', no '--' and no '..'. Both
# are free to mean something in a folder's name.
_HUB_WORD = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_CLAIM = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_MAX_HUB_ID = 96


class SourceError(ValueError):
    """A source that cannot be read; the message names it and says what to write."""


class HubModel(msgspec.Struct, frozen=True, kw_only=True):
    """`repository` is ORG/NAME or NAME. `revision` is a branch, a tag or a commit; "" is the
    hub's main branch."""

    repository: str
    revision: str = ""

    @property
    def folder_name(self) -> str:
        """The folder of this model below the one it is fetched into: ORG--NAME[@REVISION]. Two
        sources have two folders."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}".replace("/", "--")

    @property
    def name(self) -> str:
        """What clients call the model unless they are told otherwise."""
        return self.repository

    def __str__(self) -> str:
        return f"{HUB_SCHEME}{self.repository}" + (f"@{self.revision}" if self.revision else "")


class ClaimFolder(msgspec.Struct, frozen=True, kw_only=True):
    """`folder` is relative to the claim's root; "" is the root."""

    claim: str
    folder: str = ""

    @property
    def name(self) -> str:
        """What clients call the model unless they are told otherwise."""
        return self.folder.rsplit("/", 1)[-1] or self.claim

    def __str__(self) -> str:
        return f"{CLAIM_SCHEME}{self.claim}" + (f"/{self.folder}" if self.folder else "")


ModelSource = HubModel | ClaimFolder


def parse_source(text: str) -> ModelSource:
    """Read hf://... or pvc://...; raise SourceError."""
    if text.startswith(HUB_SCHEME):
        return _hub_model(text)
    if text.startswith(CLAIM_SCHEME):
        return _claim_folder(text)
    raise SourceError(
        f"model source {text!r} is unknown: write hf://ORG/NAME[@REVISION] or pvc://CLAIM/FOLDER"
    )


def _hub_model(text: str) -> HubModel:
    repository, at, revision = text.removeprefix(HUB_SCHEME).partition("@")
    words = repository.split("/")
    if len(words) > 2 or len(repository) > _MAX_HUB_ID or not all(map(_is_hub_word, words)):
        raise SourceError(
            f"model source {text!r}: {repository!r} is no repository of a hub;"
            " write hf://ORG/NAME[@REVISION], such as hf://Qwen/Qwen3-0.6B"
        )
    if at and not all(map(_is_hub_word, revision.split("/"))):
        raise SourceError(
            f"model source {text!r}: {revision!r} is no revision;"
            " write a branch, a tag or a commit behind the '@', or nothing"
        )
    return HubModel(repository=repository, revision=revision)


def _is_hub_word(word: str) -> bool:
    return bool(_HUB_WORD.fullmatch(word)) and "--" not in word and ".." not in word


def _claim_folder(text: str) -> ClaimFolder:
    claim, _, folder = text.removeprefix(CLAIM_SCHEME).partition("/")
    if not _CLAIM.fullmatch(claim):
        raise SourceError(
            f"model source {text!r}: {claim!r} is no name of a PersistentVolumeClaim;"
            " write pvc://CLAIM/FOLDER, the claim in small letters, digits, '-' and '.'"
        )
    parts = folder.rstrip("/").split("/") if folder.rstrip("/") else []
    if any(part in ("", ".", "..") for part in parts) or not folder.isprintable():
        raise SourceError(
            f"model source {text!r}: {folder!r} is no folder below the claim's root;"
            " write pvc://CLAIM/FOLDER without empty, '.' and '..' parts"
        )
    return ClaimFolder(claim=claim, folder="/".join(parts))
