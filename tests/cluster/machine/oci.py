"""A container image without docker: an OCI image layout as one tar file.

In: layers (tar files, uncompressed) and the image's configuration. Out: an archive that
`ctr images import` and `kind load image-archive` accept.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MEDIA = "application/vnd.oci.image"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Image:
    """An image. `name` needs a registry with a dot, else it would mean a public registry."""

    name: str
    layers: Sequence[Path]
    user: str = "65532:65532"
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()


def write_image(archive: Path, image: Image) -> None:
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        layers = [_add_layer(tar, layer) for layer in image.layers]
        config = _add(tar, _MEDIA + ".config.v1+json", _config(image, layers))
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": config,
            "layers": layers,
        }
        _put_index(tar, image.name, _add(tar, f"{_MEDIA}.manifest.v1+json", manifest))


def repack(archive: Path, name: str, exported: Path, *, whole: bool) -> None:
    """Write an archive of an image that a builder exported as manifest.json and blobs named by
    digest. Unless `whole`, it holds only the last layer."""
    manifest = (exported / "manifest.json").read_bytes()
    parts = json.loads(manifest)
    digest = hashlib.sha256(manifest).hexdigest()
    entry = _descriptor(parts["mediaType"], digest, len(manifest))
    layers = parts["layers"] if whole else parts["layers"][-1:]
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for one in (parts["config"], *layers):
            blob = one["digest"].removeprefix("sha256:")
            tar.add(exported / blob, f"blobs/sha256/{blob}")
        _put(tar, f"blobs/sha256/{digest}", manifest)
        _put_index(tar, name, entry)


def _config(image: Image, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    machine = platform.machine()
    return {
        "architecture": _MACHINES.get(machine, machine),
        "os": "linux",
        # The digest of an uncompressed layer is also its diff id.
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
        "config": {
            "User": image.user,
            "Env": [f"{name}={value}" for name, value in image.environment.items()],
            "Cmd": list(image.command),
            "WorkingDir": "/",
        },
    }


def _put_index(tar: tarfile.TarFile, name: str, manifest: dict[str, Any]) -> None:
    manifest["annotations"] = {"io.containerd.image.name": name}
    _put(tar, "index.json", _bytes({"schemaVersion": 2, "manifests": [manifest]}))
    _put(tar, "oci-layout", _bytes({"imageLayoutVersion": "1.0.0"}))


def _add_layer(tar: tarfile.TarFile, layer: Path) -> dict[str, Any]:
    with open(layer, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    tar.add(layer, f"blobs/sha256/{digest}")
    return _descriptor(f"{_MEDIA}.layer.v1.tar", digest, layer.stat().st_size)


def _add(tar: tarfile.TarFile, kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    data = _bytes(content)
    digest = hashlib.sha256(data).hexdigest()
    _put(tar, f"blobs/sha256/{digest}", data)
    return _descriptor(kind, digest, len(data))


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
