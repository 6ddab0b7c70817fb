"""The images of the shipped Dockerfiles start as any user, on a read-only root file system.

buildah builds them (see `machine/builds`). They run without a container engine: in their own files,
read-only except /tmp, with their own variables and entry points.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from baton_cli.commands.up import reserve_port
from tests.cluster.machine.builds import (
    OPERATOR,
    ROUTER,
    SIM,
    TORCH,
    Build,
    Target,
    build_small,
    build_torch,
)
from tests.cluster.machine.programs import print_progress
from tests.support.needs import needs
from tests.support.project.debian import install_needed
from tests.support.project.entry_points import (
    KUBECONFIG,
    UNKNOWN_UID,
    wait_until_it_answers,
    words_of,
)

Report = Callable[[str, object], None]
MB = 1e6
# The limit for what a Dockerfile adds to its base, for images without torch.
MAX_ADDED_BYTES = 200 * MB  # 189 MB now, of which obstore has 17, uvloop 14 and llguidance 8
END_S = 120.0
# Like a container in Kubernetes; it shares only /dev and, here, the network with this machine. The
# shell stays the first process: if it is killed, the kernel kills all others.
START = """
set -e
mount --make-rprivate /
mount --bind {root} {root}
mount -o remount,bind,ro {root}
mount -t tmpfs tmpfs {root}/tmp
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mkdir {root}/tmp/volume
mount --bind -o ro {volume} {root}/tmp/volume
setpriv --no-new-privs chroot --userspec={uid}:{uid} --groups= {root} env -i "$@"
exit
"""


@pytest.fixture(scope="module")
def small() -> Build:
    needs("cluster")
    install_needed(print_progress)
    return build_small(print_progress)


@pytest.fixture
def volume(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    """Files in place of a volume, readable by every user."""
    folder = tmp_path / "volume"
    folder.mkdir()
    (folder / "kubeconfig").write_text(KUBECONFIG)
    shutil.copytree(tiny_model("llama-gqa1"), folder / "model")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


class RunningImage:
    """A process that runs in an image's files."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        self._process.wait(END_S)

    def users(self) -> set[int]:
        """The user ids of the image's processes, once it serves."""
        [shell] = psutil.Process(self._process.pid).children()
        return {child.uids().real for child in shell.children(recursive=True)}


@contextmanager
def run_image(
    build: Build, target: Target, volume: Path, command: list[str], log: Path
) -> Iterator[RunningImage]:
    """Run `command` in the image's files, instead of its entry point and command."""
    with build.files_of(target) as root, log.open("wb") as output:
        script = START.format(root=root, volume=volume, uid=UNKNOWN_UID)
        variables = [*build.facts(target).config["Env"], "KUBECONFIG=/tmp/volume/kubeconfig"]
        # Each of them dies with the process that started it.
        isolated = ("setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork")
        with subprocess.Popen(
            [*isolated, "--kill-child", "sh", "-c", script, "sh", *variables, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ) as process:
            try:
                yield RunningImage(process, log)
            finally:
                process.kill()
                process.wait(END_S)


def check(build: Build, target: Target, names: list[str], volume: Path, report: Report) -> None:
    """Start each entry point of an image, and report the image's size and user."""
    facts = build.facts(target)
    log = volume.parent / "log"
    for name in names:
        with reserve_port("127.0.0.1", 0) as reserved:
            arguments, url = words_of(name, reserved.getsockname()[1], "/tmp/volume/model")
            command = [*facts.config["Entrypoint"], *arguments]
            with run_image(build, target, volume, command, log) as one:
                wait_until_it_answers(url, one.ended, one.log)
                assert one.users() == {UNKNOWN_UID}
    stage = f" (target {target.stage})" if target.stage else ""
    whole, added = sum(facts.sizes) / MB, sum(facts.sizes[1:]) / MB
    report(
        "images",
        f"{target.name}: built from {target.room}/Dockerfile{stage}, {whole:.0f} MB,"
        f" {added:.0f} MB above {target.base}, uid {facts.config['User']};"
        f" started as uid {UNKNOWN_UID}, read-only: {', '.join(names)}",
    )


@pytest.mark.parametrize(("target", "names"), [
    (OPERATOR, ["operator"]), (ROUTER, ["router"]), (SIM, ["sim prefill", "sim decode"]),
], ids=["operator", "router", "sim"])  # fmt: skip
def test_an_image_starts_as_any_user_with_a_read_only_root(
    target: Target, names: list[str], small: Build, volume: Path, record_property: Report
) -> None:
    check(small, target, names, volume, record_property)
    assert sum(small.facts(target).sizes[1:]) < MAX_ADDED_BYTES


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_image_with_torch_starts_as_any_user_with_a_read_only_root(
    volume: Path, record_property: Report
) -> None:
    needs("cluster")
    install_needed(print_progress)
    check(
        build_torch(print_progress), TORCH, ["torch decode", "sim decode"], volume, record_property
    )


@pytest.mark.parametrize("target", [OPERATOR, ROUTER, SIM], ids=lambda one: one.name)
def test_an_image_holds_only_what_its_dockerfile_copies(target: Target, small: Build) -> None:
    """Three layers: the base and two COPY below /opt/baton. It adds no user to /etc/passwd."""
    assert len(small.facts(target).layers) == 3
    with small.files_of(target) as root:
        assert ":65532:" not in (root / "etc" / "passwd").read_text()
        assert [path.name for path in (root / "opt").iterdir()] == ["baton"]
        assert not (root / "src").exists()
        assert not (root / "wheels").exists()


@pytest.mark.parametrize("target", [OPERATOR, ROUTER, SIM], ids=lambda one: one.name)
def test_bytecode_in_an_image_is_checked_by_hash_and_holds_no_time(
    target: Target, small: Build
) -> None:
    """A .pyc file's second word: 0 for a time, 1 for an unchecked hash, 3 for a checked one."""
    with small.files_of(target) as root:
        compiled = list((root / "opt" / "baton").rglob("*.pyc"))
        kinds = {int.from_bytes(one.read_bytes()[4:8], "little") for one in compiled}
    assert len(compiled) > 500
    assert kinds == {3}


def test_only_tmp_is_writable(small: Build, volume: Path, tmp_path: Path) -> None:
    shell = "id -u; true > /tmp/new && echo written; true > /opt/baton/new; true > /new; echo end"
    log = tmp_path / "log"
    with run_image(small, SIM, volume, ["sh", "-c", shell], log) as one:
        one.wait()
    lines = one.log().splitlines()
    assert lines[:2] == [str(UNKNOWN_UID), "written"]
    assert lines[-1] == "end"
    assert one.log().count("Read-only file system") == 2, lines
