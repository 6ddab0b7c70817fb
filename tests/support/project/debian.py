"""Debian packages: installs those that cluster nodes need, and unpacks those for images and the
browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.support.project.cache import Progress

# A file that shows that the package is installed -> the package.
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
# Downloads may go into root's folders; wait for another apt to end.
_APT = ("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "DPkg::Lock::Timeout=300")
BROWSER = ("chromium", "fonts-inter", "fonts-dejavu-core")
_DEPENDS = re.compile(r"^ +Depends: ((?:lib|lua)\S+)$", re.MULTILINE)
_PLANNED = re.compile(r"^Inst (\S+)", re.MULTILINE)


def install_needed(progress: Progress) -> None:
    missing = [package for path, package in NEEDED.items() if not Path(path).exists()]
    if missing:
        progress(f"installing {' '.join(missing)}")
        _apt("install", "-y", "--no-install-recommends", *missing, folder=Path("/"))


def unpack_redis(folder: Path, progress: Progress) -> None:
    """Unpack Redis and the libraries that it depends on below `folder`. It is not installed: tests
    that start Redis would find it on PATH, and no longer test the one that the checkout brings."""
    progress("fetching Redis")
    archives = folder / "archives"
    archives.mkdir()
    _apt("download", *REDIS, folder=archives)
    known = _run(["apt-cache", "depends", *REDIS], archives)
    # Use this machine's C library, because its loader loads the others.
    libraries = sorted(set(_DEPENDS.findall(known)) - {"libc6"})
    _apt("download", *libraries, folder=archives)
    for archive in sorted(archives.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(folder)], archives)
    shutil.rmtree(archives)


def unpack_faketime(folder: Path, progress: Progress) -> None:
    """Unpack libfaketime below `folder`. It depends only on the C library."""
    progress("fetching libfaketime")
    _apt("download", "libfaketime", folder=folder)
    for archive in sorted(folder.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(folder)], folder)
        archive.unlink()


def unpack_browser(folder: Path, progress: Progress) -> None:
    """Unpack Chromium, two fonts, and what they depend on and this machine lacks below `folder`,
    which needs no root. If the machine has Chromium, only what else it lacks."""
    progress("fetching Chromium and fonts: 120 MB")
    planned = _apt("install", "--simulate", "--no-install-recommends", *BROWSER, folder=folder)
    archives = folder / "archives"
    archives.mkdir()
    if packages := _PLANNED.findall(planned):
        _apt("download", *packages, folder=archives)
    for archive in sorted(archives.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(folder)], archives)
    shutil.rmtree(archives)


def _apt(*arguments: str, folder: Path) -> str:
    """Run apt, and return its output. If it fails, update the package lists, which may be empty or
    old, and retry."""
    try:
        return _run([*_APT, *arguments], folder)
    except subprocess.CalledProcessError:
        _run([*_APT, "update"], folder)
        return _run([*_APT, *arguments], folder)


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout
