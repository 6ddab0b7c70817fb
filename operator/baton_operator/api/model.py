"""The spec's `model`: where it comes from, its name in the API, and where a fetched one is kept."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from baton_operator.api.cel import CelRule, given, matches, quoted, ruled
from baton_operator.api.fields import MaybeName
from baton_operator.api.record import Record
from baton_operator.api.resources import Quantity, check_quantity
from baton_operator.api.schema_extras import SET
from baton_operator.api.secrets import SecretRef
from baton_protocol.model_source import ModelSource, parse_source

# Must equal what baton_protocol.model_source parses; a test compares them.
_HUB_WORD = "[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB = rf"hf://({_HUB_WORD}/)?{_HUB_WORD}(@{_HUB_WORD}(/{_HUB_WORD})*)?"
_CLAIM = r"pvc://[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(/([^/\pC\pZ]| )+)*/*"
Folder = Annotated[
    str,
    ruled(
        CelRule(
            "self == '' || self.startsWith('/')",
            "not an absolute path; write one that starts with '/', such as /models/NAME",
        ),
        max_length=1024,
    ),
]
ModelUri = Annotated[
    str,
    ruled(
        CelRule(
            "self == '' || self.startsWith('hf://') || self.startsWith('pvc://')",
            "not a known source; write hf://ORG/NAME[@REVISION] or pvc://CLAIM/FOLDER",
        ),
        CelRule(
            f"!self.startsWith('hf://') || ({matches(_HUB)} && !self.contains('--')"
            f" && !self.contains('..') && {matches('hf://[^@]{1,96}(@.*)?')})",
            "not a hub repository; write hf://ORG/NAME[@REVISION], such as hf://Qwen/Qwen3-0.6B",
        ),
        CelRule(
            f"!self.startsWith('pvc://') || ({matches(_CLAIM)}"
            rf" && !self.matches({quoted(r'/[.]{1,2}(/|$)')}))",
            "not a folder of a PersistentVolumeClaim; write pvc://CLAIM/FOLDER, without empty, '.'"
            " and '..' parts",
        ),
        max_length=1024,
    ),
]
_NAME = matches("[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
_NAME_CHARACTERS = (
    "contains characters that are not allowed; write letters, digits and any of . _ : / @ + -, "
    "such as org/model"
)
ModelName = Annotated[
    str, ruled(CelRule(f"self == '' || {_NAME}", _NAME_CHARACTERS), max_length=256)
]
ModelAlias = Annotated[str, ruled(CelRule(_NAME, _NAME_CHARACTERS), max_length=256)]


class ModelCache(Record, frozen=True, kw_only=True):
    """Where fetched models are kept."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"{given('claimName')} != {given('hostPath')}",
            "needs exactly one place; write claimName or hostPath, or leave cache out, so each "
            "pod fetches the model itself",
        ),
    )

    claim_name: Annotated[
        MaybeName,
        Meta(
            description="A PersistentVolumeClaim that all nodes can write. The model is fetched"
            " once."
        ),
    ] = ""
    host_path: Annotated[
        Folder,
        Meta(
            description="A directory on the cluster's nodes. The model is fetched once per cluster"
            " node. Pod Security level `restricted` does not allow it."
        ),
    ] = ""


class ModelSpec(Record, frozen=True, kw_only=True):
    """The model that all nodes serve."""

    _fetched: ClassVar[str] = "(has(self.uri) && self.uri.startsWith('hf://'))"
    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"!{given('path')} || !{given('uri')}",
            "must not be set together with path; write one of the two",
            field=".uri",
        ),
        CelRule(
            f"!has(self.secretRef) || {_fetched}",
            "only a model from a hub needs a token; write uri: hf://ORG/NAME, or leave this out",
            field=".secretRef",
        ),
        CelRule(
            f"!has(self.cache) || {_fetched}",
            "only a model from a hub is fetched; write uri: hf://ORG/NAME, or leave this out",
            field=".cache",
        ),
        CelRule(
            f"!has(self.storage) || ({_fetched} && !has(self.cache))",
            "only a model that each pod fetches uses the pod's storage; write uri: "
            "hf://ORG/NAME without cache, or leave this out",
            field=".storage",
        ),
    )

    path: Annotated[
        Folder,
        Meta(
            description="A Hugging Face model directory in the node's container, from the image or"
            " the podTemplate."
        ),
    ] = ""
    uri: Annotated[
        ModelUri,
        Meta(
            description="Source of the model: pvc://CLAIM/FOLDER, or hf://ORG/NAME[@REVISION],"
            " which is fetched."
        ),
    ] = ""
    name: Annotated[
        ModelName,
        Meta(
            description="Model name in the API. Default: the last component of the folder or"
            " repository."
        ),
    ] = ""
    aliases: Annotated[
        tuple[ModelAlias, ...],
        Meta(
            max_length=16,
            description="More names under which clients may ask for the model. Answers show the"
            " name.",
            extra_json_schema=SET,
        ),
    ] = ()
    secret_ref: Annotated[
        SecretRef | None,
        Meta(description="Secret whose key `token` holds the hub's access token. Only for hf://."),
    ] = None
    cache: Annotated[
        ModelCache | None, Meta(description="Where the fetched model is kept. Only for hf://.")
    ] = None
    storage: (
        Annotated[
            Quantity,
            Meta(
                description="Ephemeral storage that each node's pod requests for the fetched model,"
                " and the model's maximum size. Only for hf:// without cache. Default: 20Gi, or 1Gi"
                " for a simulated engine, which fetches no weights."
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.storage is not None:
            check_quantity("storage", self.storage)
        if self.path and self.uri:
            raise ValueError("uri: must not be set together with path; write one of the two")
        if self.uri:
            try:
                parse_source(self.uri)
            except ValueError as error:
                raise ValueError(f"uri: {error}") from error

    @property
    def source(self) -> ModelSource | None:
        """The parsed `uri`; None if it is empty."""
        return parse_source(self.uri) if self.uri else None
