"""buildah, with its image store in one folder.

In: a folder, a base's files, Dockerfiles. Out: images with their files, sizes and settings. buildah
caches layers by their inputs, as other builders do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SEARCH_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
# The pip settings of this machine that also apply in a container.
_PIP_SETTING = re.compile(
    r"^[^.]*\.(index-url|extra-index-url|trusted-host|proxy|timeout|default-timeout|retries)='(.*)'$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Facts:
    """An image's configuration and its layers, the base's first: digests and uncompressed sizes in
    bytes."""

    config: Mapping[str, Any]
    layers: Sequence[str]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Buildah:
    folder: Path

    def run(self, *args: str) -> str:
        """Run a buildah command and return its output."""
        store = (f"--root={self.folder / 'images'}", f"--runroot={self.folder / 'run'}")
        done = subprocess.run(
            ["buildah", "--storage-driver=overlay", *store, *args],
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
            capture_output=True,
            text=True,
        )
        assert not done.returncode, f"buildah {' '.join(args)}:\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def import_base(self, name: str, archive: Path) -> None:
        """Make an image of one layer."""
        container = self.run("from", "scratch")
        self.run("add", "--quiet", container, str(archive), "/")
        self.run("config", f"--env=PATH={SEARCH_PATH}", container)
        self.run("commit", "--quiet", "--rm", container, f"docker.io/library/{name}")

    def build(self, dockerfile: Path, stage: str, base: str, context: Path, tag: str) -> None:
        """Build a stage, "" for the last one, on an image that `import_base` made."""
        with tempfile.NamedTemporaryFile("w", dir=self.folder) as settings:
            settings.write(_pip_settings())
            settings.flush()
            # Mounted only during the build's commands, so in no layer.
            mounts = {str(CERTIFICATES): str(CERTIFICATES), settings.name: "/etc/pip.conf"}
            self.run(
                *("bud", "--layers", "--pull-never", "--network=host"),
                *(f"--volume={source}:{target}:ro" for source, target in mounts.items()),
                *([f"--target={stage}"] if stage else []),
                f"--build-arg=BASE={base}",
                *(f"--file={dockerfile}", f"--tag={tag}", str(context)),
            )

    def facts(self, tag: str) -> Facts:
        found = json.loads(self.run("inspect", "--type=image", tag))
        layers = json.loads(found["Manifest"])["layers"]
        return Facts(
            found["OCIv1"]["config"],
            [layer["digest"] for layer in layers],
            [layer["size"] for layer in layers],
        )

    def export(self, tag: str, folder: Path) -> None:
        """Write manifest.json, and beside it configuration and layers, named by their digests."""
        self.run("push", "--quiet", "--disable-compression", "--format=oci", tag, f"dir:{folder}")

    @contextmanager
    def files_of(self, tag: str) -> Iterator[Path]:
        """The image's file system, mounted while the block runs."""
        container = self.run("from", "--pull-never", tag)
        try:
            yield Path(self.run("mount", container))
        finally:
            self.run("rm", container)

    def remove(self, *tags: str) -> None:
        """Remove these images if they exist, even if a killed run left them mounted, and all layers
        that no other image needs."""
        names = self.run("images", "--format={{.Name}}:{{.Tag}}").splitlines()
        for name in {name.removeprefix("localhost/") for name in names} & {*tags}:
            self.run("rmi", "--force", name)
        self.run("rmi", "--prune")


def _pip_settings() -> str:
    """A pip.conf with this machine's registry, used only during the build."""
    args = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    lines = [f"{name} = {value}" for name, value in _PIP_SETTING.findall(settings)]
    return "\n".join(["[global]", f"cert = {CERTIFICATES}", *lines, ""])
