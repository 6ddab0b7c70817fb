"""The cluster's programs, built once from a Go module and kept in the user's cache.

In: the Go module tests/cluster/kube (Kubernetes, etcd, CoreDNS, kubectl and Helm as one program).
Out: a folder with that program under each of its names, and the pause program of pods. The folder's
name holds a digest of the module and the compiler, so only a change of these causes a new build.
`make cluster-tools` builds (5 to 8 minutes on two cores) and reports its progress; tests never
build.
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
    """The programs' folder, if they have been built."""
    folder = cache_folder() / f"{_KIND}-{module_digest(SOURCE)}"
    return folder if is_made(folder) else None


def build_programs(progress: Progress) -> Path:
    """Build the programs if necessary, and return their folder."""
    return made_once(_KIND, module_digest(SOURCE), lambda folder: _build(folder, progress))


def module_digest(source: Path) -> str:
    """A digest of the compiler and of all Go modules in the folder `source`."""
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
    """Kubernetes' version, and linker flags that set it. Without them the API server reports
    v0.0.0, and Helm's version checks fail."""
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
    source: Path, args: list[str], progress: Progress, total: int = 0, *, experiment: str = ""
) -> list[str]:
    """Run go in the module `source`; return its output lines. The lines of a build with -v are the
    compiled packages, `total` at most. `experiment` is a value of GOEXPERIMENT."""
    started = reported = time.monotonic()
    lines = []
    with subprocess.Popen(
        ["go", *args],
        cwd=source,
        env={**os.environ, "CGO_ENABLED": "0", "GOEXPERIMENT": experiment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if total and time.monotonic() > reported + REPORT_EVERY_S:
                reported = time.monotonic()
                progress(f"{len(lines)} of at most {total} packages, {reported - started:.0f} s")
    if process.returncode:
        raise SystemExit(f"go {args[0]} failed:\n{''.join(lines[-30:])}")
    return lines


def print_progress(line: str) -> None:
    print(f"cluster tools: {line}", file=sys.stderr, flush=True)
