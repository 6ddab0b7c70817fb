"""Debian packages: what nodes run with is installed, what goes into an image is only unpacked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.support.project.cache import Progress

# A file that proves it is there, and the package that brings it.
NEEDED = {
    "/usr/bin/containerd": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/sbin/nft": "nftables",
    "/usr/sbin/ip": "iproute2",
    "/etc/ssl/certs/ca-certificates.crt": "ca-certificates",
    "/usr/bin/buildah": "buildah",
    "/usr/bin/mmdebstrap": "mmdebstrap",
}
REDIS = ("redis-server", "redis-tools")
# As root in root's own folders; and whoever else installs something now ends some time.
_APT = ("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "DPkg::Lock::Timeout=300")
_DEPENDS = re.compile(r"^ +Depends: ((?:lib|lua)\S+)$", re.MULTILINE)


def install_needed(progress: Progress) -> None:
    missing = [package for path, package in NEEDED.items() if not Path(path).exists()]
    if missing:
        progress(f"installing {' '.join(missing)}")
        _apt("install", "-y", "--no-install-recommends", *missing, folder=Path("/"))


def unpack_redis(folder: Path, progress: Progress) -> None:
    """Redis and the libraries that it names, below `folder`. Not installed: the tests that start
    Redis themselves would find it on PATH and no longer test what the checkout brings."""
    progress("fetching Redis")
    archives = folder / "archives"
    archives.mkdir()
    _apt("download", *REDIS, folder=archives)
    known = _run(["apt-cache", "depends", *REDIS], archives)
    # The C library is this machine's, whose loader says what else is needed.
    libraries = sorted(set(_DEPENDS.findall(known)) - {"libc6"})
    _apt("download", *libraries, folder=archives)
    for archive in sorted(archives.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(folder)], archives)
    shutil.rmtree(archives)


def unpack_faketime(folder: Path, progress: Progress) -> None:
    """The library that gives a process another time of day. It needs nothing but the C library."""
    progress("fetching libfaketime")
    _apt("download", "libfaketime", folder=folder)
    for archive in sorted(folder.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(folder)], folder)
        archive.unlink()


def _apt(*words: str, folder: Path) -> None:
    """Once more with fresh lists where it fails: those of a new machine are empty, or old."""
    try:
        _run([*_APT, *words], folder)
    except subprocess.CalledProcessError:
        _run([*_APT, "update"], folder)
        _run([*_APT, *words], folder)


def _run(words: list[str], folder: Path) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout
