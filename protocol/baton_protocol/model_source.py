"""The address of a model that is not in a local folder yet, as users write it.

    hf://ORG/NAME[@REVISION]    a repository of a Hugging Face hub (ORG/ may be missing: hf://gpt2)
    pvc://CLAIM[/FOLDER]        a folder on a Kubernetes PersistentVolumeClaim, or a GGUF file there

`parse_source` returns a `HubModel` or a `ClaimFolder`, or raises SourceError. It does no I/O and
does not check that the model exists. The command that fetches a model and the manifests that point
a node to it both compute its folder with `HubModel.folder_name`.
"""

from __future__ import annotations

import re

import msgspec

HUB_SCHEME = "hf://"
CLAIM_SCHEME = "pvc://"
# The hub's own rule: letters, digits, '_', '-' and '.', but no '--' and no '..'. So folder names
# can use '--' as a separator.
_HUB_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_CLAIM = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_MAX_HUB_ID = 96
GGUF_SUFFIX = ".gguf"


class SourceError(ValueError):
    """Not a valid source. The message quotes the source and gives the expected form."""


class HubModel(msgspec.Struct, frozen=True, kw_only=True):
    """A repository of a Hugging Face hub.

    `repository` is ORG/NAME or NAME. `revision` is a branch, a tag or a commit; "" means the
    repository's main branch.
    """

    repository: str
    revision: str = ""

    @property
    def folder_name(self) -> str:
        """The model's folder below the models directory: ORG--NAME[@REVISION], unique for each
        source."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}".replace("/", "--")

    @property
    def name(self) -> str:
        """The default name under which the API serves the model."""
        return self.repository

    def __str__(self) -> str:
        return f"{HUB_SCHEME}{self.repository}" + (f"@{self.revision}" if self.revision else "")


class ClaimFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder on a PersistentVolumeClaim. `folder` is relative to the claim's root; "" is the
    root."""

    claim: str
    folder: str = ""

    @property
    def name(self) -> str:
        """The default name under which the API serves the model."""
        return name_of_path(self.folder) or self.claim

    def __str__(self) -> str:
        return f"{CLAIM_SCHEME}{self.claim}" + (f"/{self.folder}" if self.folder else "")


ModelSource = HubModel | ClaimFolder


def name_of_path(path: str) -> str:
    """The default name of a model in a folder or a GGUF file, "" if the path has no last part."""
    return path.rstrip("/").rsplit("/", 1)[-1].removesuffix(GGUF_SUFFIX)


def parse_source(text: str) -> ModelSource:
    """Parse hf://... or pvc://...; raise SourceError for anything else."""
    if text.startswith(HUB_SCHEME):
        return _hub_model(text)
    if text.startswith(CLAIM_SCHEME):
        return _claim_folder(text)
    raise SourceError(
        f"model source {text!r} is unknown: write hf://ORG/NAME[@REVISION] or pvc://CLAIM/FOLDER"
    )


def _hub_model(text: str) -> HubModel:
    repository, at, revision = text.removeprefix(HUB_SCHEME).partition("@")
    parts = repository.split("/")
    if len(parts) > 2 or len(repository) > _MAX_HUB_ID or not all(map(_is_hub_name, parts)):
        raise SourceError(
            f"model source {text!r}: {repository!r} is not a valid repository name;"
            " write hf://ORG/NAME[@REVISION], such as hf://Qwen/Qwen3-0.6B"
        )
    if at and not all(map(_is_hub_name, revision.split("/"))):
        raise SourceError(
            f"model source {text!r}: {revision!r} is not a valid revision;"
            " write a branch, a tag or a commit after the '@', or omit the '@'"
        )
    return HubModel(repository=repository, revision=revision)


def _is_hub_name(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and "--" not in name and ".." not in name


def _claim_folder(text: str) -> ClaimFolder:
    claim, _, folder = text.removeprefix(CLAIM_SCHEME).partition("/")
    if not _CLAIM.fullmatch(claim):
        raise SourceError(
            f"model source {text!r}: {claim!r} is not a valid PersistentVolumeClaim name;"
            " write pvc://CLAIM/FOLDER, the claim in lowercase letters, digits, '-' and '.'"
        )
    parts = folder.rstrip("/").split("/") if folder.rstrip("/") else []
    if any(part in ("", ".", "..") for part in parts) or not folder.isprintable():
        raise SourceError(
            f"model source {text!r}: {folder!r} is not a valid folder below the claim's root;"
            " write pvc://CLAIM/FOLDER without empty, '.' or '..' parts"
        )
    return ClaimFolder(claim=claim, folder="/".join(parts))
