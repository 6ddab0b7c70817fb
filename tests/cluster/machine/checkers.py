"""Third-party checkers of manifests: kube-score, trivy and checkov, in pinned versions.

In: the folder tests/cluster/checkers: one Go module for kube-score, one for trivy's scanners, and
checkov's packages. Out: a folder with these programs, built once and kept in the user's cache, and
their findings in a folder of NAME.yaml and NAME.Dockerfile. `make cluster-tools` builds them (3 to
5 minutes on two cores, 0.4 GB); tests never build.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.machine.programs import module_digest, run_go
from tests.support.project.cache import Progress, cache_folder, is_made, made_once

SOURCE = Path(__file__).parents[1] / "checkers"
_PACKAGES = SOURCE / "checkov.txt"
_KIND = "checkers"
_TIMEOUT_S = 300.0
# The oldest version that the chart supports.
_KUBERNETES = "v1.30"
_GRADE_OK = 10


class Finding(NamedTuple):
    """A failed check of a file in the folder; `file` has no suffix."""

    check: str
    file: str
    text: str


def built_checkers() -> Path | None:
    """The checkers' folder, if they have been built."""
    folder = cache_folder() / f"{_KIND}-{_digest()}"
    return folder if is_made(folder) else None


def build_checkers(progress: Progress) -> Path:
    """Build the checkers if necessary, and return their folder."""
    return made_once(_KIND, _digest(), lambda folder: _build(folder, progress))


def _digest() -> str:
    args = f"{module_digest(SOURCE)} {sys.version_info[:2]} {_PACKAGES.read_text()}"
    return hashlib.sha256(args.encode()).hexdigest()[:16]


def _build(folder: Path, progress: Progress) -> None:
    progress("building kube-score, once")
    _build_go(folder, "kube-score", "github.com/zegl/kube-score/cmd/kube-score", progress)
    progress("building trivy's scanners, once")
    _build_go(folder, "trivy", ".", progress)
    progress("installing checkov, once")
    venv.create(folder / "checkov", with_pip=True)
    python = str(folder / "checkov" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(_PACKAGES)], check=True)
    progress(f"built {folder}")


def _build_go(folder: Path, name: str, package: str, progress: Progress) -> None:
    module = SOURCE / name
    json_v2 = "jsonv2"  # trivy imports encoding/json/v2
    total = len(run_go(module, ["list", "-deps", package], progress, experiment=json_v2))
    flags = ["-v", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", str(folder / name)]
    run_go(module, ["build", *flags, package], progress, total, experiment=json_v2)


def kube_score(checkers: Path, folder: Path) -> list[Finding]:
    """One check covers several rules, so the comment is part of the check's name."""
    files = sorted(str(path) for path in folder.rglob("*.yaml"))
    flags = ["--output-format=json", f"--kubernetes-version={_KUBERNETES}"]
    reports = _run_json([str(checkers / "kube-score"), "score", *flags, *files], {0, 1})
    return [
        Finding(f"{one['check']['id']}: {comment['summary']}", _name(folder, file), "")
        for file, one in ((each["file_name"], one) for each in reports for one in each["checks"])
        if not one["skipped"] and one["grade"] < _GRADE_OK
        for comment in one["comments"]
    ]


def trivy(checkers: Path, folder: Path) -> list[Finding]:
    failures = _run_json([str(checkers / "trivy"), str(folder)], {0})
    return [
        Finding(one["check"], _name(folder, folder / one["file"]), one["message"])
        for one in failures
    ]


def checkov(checkers: Path, folder: Path) -> list[Finding]:
    python = str(checkers / "checkov" / "bin" / "python")
    flags = ["--framework=kubernetes", "--framework=dockerfile", "--skip-download", "--output=json"]
    args = [python, "-m", "checkov.main", f"--directory={folder}", *flags, "--compact", "--quiet"]
    findings, output = [], _run_json(args, {0, 1})
    # checkov prints a list of reports, or a single report.
    for report in output if isinstance(output, list) else [output]:
        assert not report["summary"]["parsing_errors"]
        for one in report["results"]["failed_checks"]:
            name = _name(folder, one["file_abs_path"])
            findings.append(Finding(one["check_id"], name, one["check_name"]))
    return findings


def _name(folder: Path, file: str | Path) -> str:
    return Path(file).relative_to(folder).with_suffix("").as_posix()


def _run_json(args: list[str], codes: set[int]) -> Any:
    """Run a checker and parse its JSON. Some exit with 1 if they have findings."""
    done = subprocess.run(args, capture_output=True, text=True, timeout=_TIMEOUT_S)
    assert done.returncode in codes, f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
    return json.loads(done.stdout)
