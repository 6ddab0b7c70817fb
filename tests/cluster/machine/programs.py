"""The cluster's programs: built from Go modules once, then found in the user's cache.

In: the Go module beside this package (Kubernetes, etcd, CoreDNS, kubectl and Helm as one program).
Out: a folder with that program under each of its names, and the pause program of pods. The folder
is named by a digest of the module and the compiler: whoever changes neither never builds again.
`make cluster-tools` builds (5 to 8 minutes on two cores) and says how far it is; the tests only
look.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.support.project.cache import Progress, cache_folder, is_made, made_once

SOURCE = Path(__file__).parents[1] / "kube"
NAMES = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"),
    *("kube-proxy", "coredns", "kubectl", "helm", "certs"),
)
_KIND = "programs"
_VERSION_PACKAGE = "k8s.io/component-base/version"
REPORT_EVERY_S = 15.0


def built_programs() -> Path | None:
    """Their folder, if they have been built."""
    folder = cache_folder() / f"{_KIND}-{module_digest(SOURCE)}"
    return folder if is_made(folder) else None


def build_programs(progress: Progress) -> Path:
    """Their folder, after the build if need be."""
    return made_once(_KIND, module_digest(SOURCE), lambda folder: _build(folder, progress))


def module_digest(source: Path) -> str:
    """Of a Go module's files and the compiler; of several modules, in a folder around them."""
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        if path.suffix in {".go", ".mod", ".sum"}:
            digest.update(path.relative_to(source).as_posix().encode() + b"\0" + path.read_bytes())
    version = ["go", "env", "GOVERSION", "GOARCH"]
    digest.update(subprocess.run(version, cwd=source, check=True, capture_output=True).stdout)
    return digest.hexdigest()[:16]


def _build(folder: Path, progress: Progress) -> None:
    version, flags = _version_flags()
    progress(f"fetching the Go modules of Kubernetes {version} (0.6 GB)")
    run_go(SOURCE, ["mod", "download"], progress)
    total = len(run_go(SOURCE, ["list", "-deps", ".", "./pause"], progress))
    build = ["build", "-v", "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {flags}"]
    progress(f"building Kubernetes {version}, {total} packages: 5 to 8 minutes, once")
    run_go(SOURCE, [*build, "-o", str(folder / "kube"), "."], progress, total)
    run_go(SOURCE, [*build, "-o", str(folder / "pause"), "./pause"], progress)
    for name in NAMES:
        (folder / name).symlink_to("kube")
    progress(f"built {folder}")


def _version_flags() -> tuple[str, str]:
    """Without them the API server calls itself v0.0.0, and Helm's checks of its version fail."""
    module = (SOURCE / "go.mod").read_text()
    found = re.search(r"^\s+k8s\.io/kubernetes v((\d+)\.(\d+)\.\d+)$", module, re.MULTILINE)
    assert found, f"{SOURCE / 'go.mod'} requires no k8s.io/kubernetes"
    values = {
        "gitVersion": f"v{found[1]}",
        "gitMajor": found[2],
        "gitMinor": found[3],
        "gitTreeState": "clean",
    }
    flags = (f"-X {_VERSION_PACKAGE}.{name}={value}" for name, value in values.items())
    return found[1], " ".join(flags)


def run_go(
    source: Path, words: list[str], progress: Progress, total: int = 0, *, experiment: str = ""
) -> list[str]:
    """The lines that go printed in the module `source`; those of a build (-v) are the packages that
    it has compiled, of `total`. `experiment` is one of Go's (GOEXPERIMENT)."""
    started = said = time.monotonic()
    lines = []
    with subprocess.Popen(
        ["go", *words],
        cwd=source,
        env={**os.environ, "CGO_ENABLED": "0", "GOEXPERIMENT": experiment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if total and time.monotonic() > said + REPORT_EVERY_S:
                said = time.monotonic()
                progress(f"{len(lines)} of at most {total} packages, {said - started:.0f} s")
    if process.returncode:
        raise SystemExit(f"go {words[0]} failed:\n{''.join(lines[-30:])}")
    return lines


def say(line: str) -> None:
    print(f"cluster tools: {line}", file=sys.stderr, flush=True)
