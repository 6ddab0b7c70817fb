"""The images of the shipped Dockerfiles, built from this checkout as it is now.

In: the Dockerfiles, what they copy, the packages of Debian and of Python. Out: images that can be
started here (`files_of`) or given to nodes (`archive`).

No registry is asked, so Debian's Python stands in for the image that the Dockerfiles begin from:
their argument BASE names it, without the digest that only the real one has. Nothing else differs:
what they do not add is in no image. Dependencies are installed once for each content of the
Dockerfiles and of the files that list them (2 to 3 minutes, 1.2 GB); then a changed source file
costs seconds. All of it is in the user's cache.
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
# The images of so many states of the sources are kept, 60 MB each.
KEPT_SOURCES = 20
# Else each checkout's own times would make its layers anew.
_TIME = 1_600_000_000
_BASE = re.compile(r"python:(?P<version>3\.\d+)\.\d+-slim-(?P<suite>[a-z]+)")
# What is at other places in the real one: /usr/local/bin is on its PATH, /usr/bin too.
_PREPARE_BASE = """
set -e
for name in python python3; do ln -s /usr/bin/python{version} "$1/usr/local/bin/$name"; done
rm "$1/usr/lib/python{version}/EXTERNALLY-MANAGED"
"""


@dataclass(frozen=True)
class Target:
    """An image, made by a stage of a room's Dockerfile; "" is the last one."""

    name: str
    room: str
    stage: str = ""

    @property
    def file(self) -> Path:
        return CHECKOUT / self.room / "Dockerfile"

    @property
    def stages(self) -> list[Stage]:
        """What it is made from, itself last."""
        stages = stages_of(self.file.read_text())
        [last] = [one for one in stages if one.name == self.stage]
        names = re.findall(r"--from=(\S+)", " ".join(last.texts("COPY")))
        copied = [one for one in stages if one.name in names]
        whole = [one for stage in (*copied, last) for one in reversed([*lineage(stages, stage)])]
        return list(dict.fromkeys(whole))

    @property
    def base(self) -> str:
        """Without its digest."""
        return self.stages[0].image.partition("@")[0]

    @property
    def requirements(self) -> list[Path]:
        """The files that say what is installed: all that is copied of the checkout by name."""
        words = [
            one
            for stage in self.stages
            for text in stage.texts("COPY")
            for one in text.split()[:-1]
        ]
        names = dict.fromkeys(one for one in words if one.endswith(".txt"))
        return [CHECKOUT / name for name in names]


OPERATOR = Target("operator", "operator")
ROUTER = Target("router", "router")
SIM = Target("sim", "node", "sim")
# 5 GB where pip finds no other torch than CUDA's.
TORCH = Target("torch", "node", "cpu")
SMALL = (OPERATOR, ROUTER, SIM)


class Build:
    """Images of one state of the sources."""

    def __init__(self, buildah: Buildah, source: str) -> None:
        self._buildah = buildah
        self._source = source

    def archive(self, target: Target) -> Path:
        """For nodes that have all of its layers but the last (see `disk`)."""
        return _folder(self._buildah, self._source) / f"{target.name}.tar"

    def write_whole(self, target: Target, archive: Path) -> None:
        """For any node."""
        _write(self._buildah, target, self._source, archive, whole=True)

    def facts(self, target: Target) -> Facts:
        return self._buildah.facts(_tag(target, self._source))

    def files_of(self, target: Target) -> AbstractContextManager[Path]:
        return self._buildah.files_of(_tag(target, self._source))


def image_name(target: Target) -> str:
    """In the test cluster. One without a dot in its first part would be a public registry's."""
    return f"baton.test/{target.name}:1"


def build_small(progress: Progress) -> Build:
    """All images without torch."""
    return _build("images", SMALL, progress)


def build_torch(progress: Progress) -> Build:
    """The node with torch, which is fetched once for each state of its Dockerfile and packages."""
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
            _forget(buildah, targets)
        _folder(buildah, source).touch()
    return Build(buildah, source)


def _make(
    buildah: Buildah,
    source: str,
    targets: Sequence[Target],
    context: Path,
    progress: Progress,
) -> None:
    made = buildah.folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for target in targets:
        for stage in target.stages[:-1]:
            # With a name its layers stay in the cache.
            tag = f"{target.room}-{stage.name}:stage"
            file = context / target.room / "Dockerfile"
            buildah.build(file, stage.name, target.base, context, tag)

    def finish(target: Target) -> None:
        tag = _tag(target, source)
        file = context / target.room / "Dockerfile"
        buildah.build(file, target.stage, target.base, context, tag)
        if target in SMALL:
            _write(buildah, target, source, made / f"{target.name}.tar", whole=False)
        progress(f"built {image_name(target)}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(finish, targets))
    _folder(buildah, source).parent.mkdir(exist_ok=True)
    made.rename(_folder(buildah, source))


def _write(buildah: Buildah, target: Target, source: str, archive: Path, *, whole: bool) -> None:
    with tempfile.TemporaryDirectory() as exported:
        buildah.export(_tag(target, source), Path(exported))
        repack(archive, image_name(target), Path(exported), whole=whole)


def _forget(buildah: Buildah, targets: Sequence[Target]) -> None:
    """What was built from sources that nobody has asked for lately."""
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


# --- what the builder sees ------------------------------------------------------------------------


def _copy_context(folder: Path, targets: Sequence[Target]) -> str:
    """What .dockerignore lets in, and the Dockerfiles themselves; a digest of it."""
    rules = [line for line in (CHECKOUT / ".dockerignore").read_text().splitlines() if line]
    patterns = [line for line in rules if not line.startswith("#")]
    parts = []
    for path in sorted({*_sent(patterns), *(one.file for one in targets)}):
        name = path.relative_to(CHECKOUT)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
        parts += [str(name).encode(), path.read_bytes()]
    shutil.copyfile(CHECKOUT / ".dockerignore", folder / ".dockerignore")
    for copied in (folder, *folder.rglob("*")):
        copied.chmod(0o755 if copied.is_dir() else 0o644)
        os.utime(copied, (_TIME, _TIME))
    return _digest(parts)


def _sent(patterns: Sequence[str]) -> Iterator[Path]:
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


# --- what the Dockerfiles begin from --------------------------------------------------------------


def _base(name: str, progress: Progress) -> Path:
    """Debian with its own Python of the same version, and pip, where the real image has them."""
    known = _BASE.fullmatch(name)
    assert known is not None, f"the Dockerfiles begin from {name}, not from a slim Python"
    python = f"python{known['version']}"
    packages = (python, f"{python}-venv", "python3-pip", "ca-certificates")
    script = _PREPARE_BASE.format(version=known["version"])

    def fill(folder: Path) -> None:
        progress(f"making {name} of Debian's packages (250 MB, half a minute)")
        hook = folder / "prepare.sh"
        hook.write_text(script)
        words = ("--variant=minbase", f"--include={','.join(packages)}")
        subprocess.run(
            [
                *("mmdebstrap", "--quiet", *words, f'--customize-hook=sh {hook} "$1"'),
                *(known["suite"], str(folder / "base.tar")),
            ],
            check=True,
        )

    recipe = " ".join((*packages, known["suite"], script)).encode()
    return made_once("python-base", _digest([recipe]), fill)
