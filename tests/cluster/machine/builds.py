"""The images of the shipped Dockerfiles, built from this checkout with its current changes.

In: the Dockerfiles, the files that they copy, packages of Debian and Python. Out: images that can
be started here (`files_of`) or imported into nodes (`archive`).

The build uses no image registry, so Debian's Python replaces the Dockerfiles' base image: the
argument BASE names it, without the real image's digest. Nothing else differs. Dependencies are
installed once per content of the Dockerfiles and of the files that list them (2 to 3 minutes, 1.2
GB); after that, a changed source file costs seconds. Everything is in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machine.buildah import Buildah, Facts
from tests.cluster.machine.oci import repack
from tests.support.project.cache import Progress, locked, made_once
from tests.support.project.dockerfiles import Stage, in_context, lineage, stages_of

CHECKOUT = Path(__file__).parents[3]
# Keep images of this many states of the sources, 60 MB each.
KEPT_SOURCES = 20
# A fixed time, because the files' own times would change the layers of each checkout.
_TIME = 1_600_000_000
_BASE = re.compile(r"python:(?P<version>3\.\d+)\.\d+-slim-(?P<suite>[a-z]+)")
# Match the real image's layout: python in /usr/local/bin, and pip may install system-wide.
_PREPARE_BASE = """
set -e
for name in python python3; do ln -s /usr/bin/python{version} "$1/usr/local/bin/$name"; done
rm "$1/usr/lib/python{version}/EXTERNALLY-MANAGED"
"""


@dataclass(frozen=True)
class Target:
    """An image, built by a stage of the Dockerfile in folder `room`; "" is the last stage."""

    name: str
    room: str
    stage: str = ""

    @property
    def file(self) -> Path:
        return CHECKOUT / self.room / "Dockerfile"

    @property
    def stages(self) -> list[Stage]:
        """The stages that the image is built from, itself last."""
        stages = stages_of(self.file.read_text())
        [last] = [one for one in stages if one.name == self.stage]
        names = re.findall(r"--from=(\S+)", " ".join(last.texts("COPY")))
        copied = [one for one in stages if one.name in names]
        ordered = [one for stage in (*copied, last) for one in reversed([*lineage(stages, stage)])]
        return list(dict.fromkeys(ordered))

    @property
    def base(self) -> str:
        """The name of the base image, without its digest."""
        return self.stages[0].image.partition("@")[0]

    @property
    def requirements(self) -> list[Path]:
        """The files that list the packages to install: all .txt files that the stages copy."""
        args = [
            one
            for stage in self.stages
            for text in stage.texts("COPY")
            for one in text.split()[:-1]
        ]
        names = dict.fromkeys(one for one in args if one.endswith(".txt"))
        return [CHECKOUT / name for name in names]


OPERATOR = Target("operator", "operator")
ROUTER = Target("router", "router")
SIM = Target("sim", "node", "sim")
# 5 GB if pip finds only torch with CUDA.
TORCH = Target("torch", "node", "cpu")
SMALL = (OPERATOR, ROUTER, SIM)


class Build:
    """Images built from one state of the sources."""

    def __init__(self, buildah: Buildah, source: str) -> None:
        self._buildah = buildah
        self._source = source

    def archive(self, target: Target) -> Path:
        """An archive for nodes that have all of the image's layers except the last (see `disk`)."""
        return _folder(self._buildah, self._source) / f"{target.name}.tar"

    def write_whole(self, target: Target, archive: Path) -> None:
        """Write an archive with all layers, for any node."""
        _write(self._buildah, target, self._source, archive, whole=True)

    def facts(self, target: Target) -> Facts:
        return self._buildah.facts(_tag(target, self._source))

    def files_of(self, target: Target) -> AbstractContextManager[Path]:
        return self._buildah.files_of(_tag(target, self._source))


def image_name(target: Target) -> str:
    """The image's name in the test cluster. The dot in its first part marks a private registry."""
    return f"baton.test/{target.name}:1"


def build_small(progress: Progress) -> Build:
    """Build all images without torch."""
    return _build("images", SMALL, progress)


def build_torch(progress: Progress) -> Build:
    """Build the node image with torch, which pip fetches once per Dockerfile and package list."""
    return _build("torch-images", (TORCH,), progress)


def _build(kind: str, targets: Sequence[Target], progress: Progress) -> Build:
    name = targets[0].base
    recipe = repr([one.stages for one in targets]).encode()
    files = dict.fromkeys(path for one in targets for path in one.requirements)
    digest = _digest([recipe, *(path.read_bytes() for path in files)])
    base = _base(name, progress)
    folder = made_once(
        kind,
        f"{digest}-{base.name}",
        lambda folder: Buildah(folder).import_base(name, base / "base.tar"),
    )
    buildah = Buildah(folder)
    with tempfile.TemporaryDirectory() as scratch, locked(folder / "sources.lock"):
        context = Path(scratch)
        source = _copy_context(context, targets)
        if not _folder(buildah, source).exists():
            names = ", ".join(one.name for one in targets)
            progress(f"building images: {names} (seconds, or minutes for new dependencies)")
            _make(buildah, source, targets, context, progress)
            _remove_old(buildah, targets)
        _folder(buildah, source).touch()
    return Build(buildah, source)


def _make(
    buildah: Buildah,
    source: str,
    targets: Sequence[Target],
    context: Path,
    progress: Progress,
) -> None:
    unfinished = buildah.folder / "made"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for target in targets:
        for stage in target.stages[:-1]:
            # A tag keeps the stage's layers in the cache.
            tag = f"{target.room}-{stage.name}:stage"
            file = context / target.room / "Dockerfile"
            buildah.build(file, stage.name, target.base, context, tag)

    def finish(target: Target) -> None:
        tag = _tag(target, source)
        file = context / target.room / "Dockerfile"
        buildah.build(file, target.stage, target.base, context, tag)
        if target in SMALL:
            _write(buildah, target, source, unfinished / f"{target.name}.tar", whole=False)
        progress(f"built {image_name(target)}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(finish, targets))
    _folder(buildah, source).parent.mkdir(exist_ok=True)
    unfinished.rename(_folder(buildah, source))


def _write(buildah: Buildah, target: Target, source: str, archive: Path, *, whole: bool) -> None:
    with tempfile.TemporaryDirectory() as exported:
        buildah.export(_tag(target, source), Path(exported))
        repack(archive, image_name(target), Path(exported), whole=whole)


def _remove_old(buildah: Buildah, targets: Sequence[Target]) -> None:
    """Remove the images of all but the most recently used sources."""
    sources = (buildah.folder / "sources").iterdir()
    newest = sorted(sources, key=lambda one: one.stat().st_mtime, reverse=True)
    old = newest[KEPT_SOURCES:]
    buildah.remove(*(_tag(target, one.name) for one in old for target in targets))
    for folder in old:
        shutil.rmtree(folder)


def _folder(buildah: Buildah, source: str) -> Path:
    return buildah.folder / "sources" / source


def _tag(target: Target, source: str) -> str:
    return f"{target.name}:{source}"


# --- the build context ----------------------------------------------------------------------------


def _copy_context(folder: Path, targets: Sequence[Target]) -> str:
    """Copy the files that .dockerignore allows, and the Dockerfiles; return a digest of them."""
    rules = [line for line in (CHECKOUT / ".dockerignore").read_text().splitlines() if line]
    patterns = [line for line in rules if not line.startswith("#")]
    parts = []
    for path in sorted({*_context_files(patterns), *(one.file for one in targets)}):
        name = path.relative_to(CHECKOUT)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
        parts += [str(name).encode(), path.read_bytes()]
    shutil.copyfile(CHECKOUT / ".dockerignore", folder / ".dockerignore")
    for copied in (folder, *folder.rglob("*")):
        copied.chmod(0o755 if copied.is_dir() else 0o644)
        os.utime(copied, (_TIME, _TIME))
    return _digest(parts)


def _context_files(patterns: Sequence[str]) -> Iterator[Path]:
    for top in CHECKOUT.iterdir():
        if in_context(patterns, top.name) or in_context(patterns, f"{top.name}/file"):
            for path in [top] if top.is_file() else top.rglob("*"):
                if path.is_file() and in_context(patterns, str(path.relative_to(CHECKOUT))):
                    yield path


def _digest(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


# --- the base image -------------------------------------------------------------------------------


def _base(name: str, progress: Progress) -> Path:
    """Debian with its own Python of the same version, and pip, at the real image's paths."""
    known = _BASE.fullmatch(name)
    assert known is not None, f"the Dockerfiles' base image {name} is no slim Python image"
    python = f"python{known['version']}"
    packages = (python, f"{python}-venv", "python3-pip", "ca-certificates")
    script = _PREPARE_BASE.format(version=known["version"])

    def fill(folder: Path) -> None:
        progress(f"making {name} of Debian's packages (250 MB, half a minute)")
        hook = folder / "prepare.sh"
        hook.write_text(script)
        args = ("--variant=minbase", f"--include={','.join(packages)}")
        subprocess.run(
            [
                *("mmdebstrap", "--quiet", *args, f'--customize-hook=sh {hook} "$1"'),
                *(known["suite"], str(folder / "base.tar")),
            ],
            check=True,
        )

    recipe = " ".join((*packages, known["suite"], script)).encode()
    return made_once("python-base", _digest([recipe]), fill)
