"""buildah, with images of its own in one folder.

In: a folder, a base's files, Dockerfiles. Out: images, whose files, sizes and settings can be asked
for. Layers are cached by what they are made from, as other builders do it.
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
# What pip is told on this machine, as far as it means the same in a container.
_PIP_SETTING = re.compile(
    r"^[^.]*\.(index-url|extra-index-url|trusted-host|proxy|timeout|default-timeout|retries)='(.*)'$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Facts:
    """What an image says of itself. Sizes are those of its layers, not compressed, the base's
    first."""

    config: Mapping[str, Any]
    layers: Sequence[str]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Buildah:
    folder: Path

    def run(self, *words: str) -> str:
        """What it printed."""
        where = (f"--root={self.folder / 'images'}", f"--runroot={self.folder / 'run'}")
        done = subprocess.run(
            ["buildah", "--storage-driver=overlay", *where, *words],
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
            capture_output=True,
            text=True,
        )
        assert not done.returncode, f"buildah {' '.join(words)}:\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def import_base(self, name: str, archive: Path) -> None:
        """An image of one layer."""
        container = self.run("from", "scratch")
        self.run("add", "--quiet", container, str(archive), "/")
        self.run("config", f"--env=PATH={SEARCH_PATH}", container)
        self.run("commit", "--quiet", "--rm", container, f"docker.io/library/{name}")

    def build(self, dockerfile: Path, stage: str, base: str, context: Path, tag: str) -> None:
        """The last stage where `stage` is ""; on an image of `import_base`."""
        with tempfile.NamedTemporaryFile("w", dir=self.folder) as settings:
            settings.write(_pip_settings())
            settings.flush()
            # There while a command of the build runs; in no layer.
            mounts = {str(CERTIFICATES): str(CERTIFICATES), settings.name: "/etc/pip.conf"}
            self.run(
                *("bud", "--layers", "--pull-never", "--network=host"),
                *(f"--volume={here}:{there}:ro" for here, there in mounts.items()),
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
        """manifest.json, and beside it configuration and layers, named by their digests."""
        self.run("push", "--quiet", "--disable-compression", "--format=oci", tag, f"dir:{folder}")

    @contextmanager
    def files_of(self, tag: str) -> Iterator[Path]:
        """As long as this is open."""
        container = self.run("from", "--pull-never", tag)
        try:
            yield Path(self.run("mount", container))
        finally:
            self.run("rm", container)

    def remove(self, *tags: str) -> None:
        """Those that are there, what a killed run left open of them, and every layer that no other
        image needs."""
        names = self.run("images", "--format={{.Name}}:{{.Tag}}").splitlines()
        for name in {name.removeprefix("localhost/") for name in names} & {*tags}:
            self.run("rmi", "--force", name)
        self.run("rmi", "--prune")


def _pip_settings() -> str:
    """The registry of this machine, for the build alone."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    lines = [f"{name} = {value}" for name, value in _PIP_SETTING.findall(told)]
    return "\n".join(["[global]", f"cert = {CERTIFICATES}", *lines, ""])
