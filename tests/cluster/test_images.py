"""The images that the shipped Dockerfiles make start as any user, on a root that nobody writes.

Each is built by buildah (see `machine/builds`) and started without a container engine: in its own
files, read-only but for /tmp, with its own variables and its own entry point.
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
# Of what a Dockerfile adds to its base. torch is another matter.
MOST_BYTES = 160 * MB  # 152 with llguidance, which is 8 MB of it
END_S = 120.0
# As Kubernetes starts a container: of the machine it has /dev and, here, the network. The shell
# stays, as the first process of the container: when it is killed the kernel kills all others.
START = """
set -e
mount --make-rprivate /
mount --bind {root} {root}
mount -o remount,bind,ro {root}
mount -t tmpfs tmpfs {root}/tmp
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mkdir {root}/tmp/given
mount --bind -o ro {given} {root}/tmp/given
setpriv --no-new-privs chroot --userspec={uid}:{uid} --groups= {root} env -i "$@"
exit
"""


@pytest.fixture(scope="module")
def small() -> Build:
    needs("cluster")
    install_needed(print_progress)
    return build_small(print_progress)


@pytest.fixture
def given(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    """What a volume would bring: readable by everybody."""
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "kubeconfig").write_text(KUBECONFIG)
    shutil.copytree(tiny_model("llama-gqa1"), folder / "model")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


class Started:
    """A process in an image's files."""

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
        """The user ids of what runs in it, once it serves."""
        [shell] = psutil.Process(self._process.pid).children()
        return {one.uids().real for one in shell.children(recursive=True)}


@contextmanager
def started(
    build: Build, target: Target, given: Path, command: list[str], log: Path
) -> Iterator[Started]:
    """`command` in place of the image's own, without its entry point."""
    with build.files_of(target) as root, log.open("wb") as output:
        script = START.format(root=root, given=given, uid=UNKNOWN_UID)
        variables = [*build.facts(target).config["Env"], "KUBECONFIG=/tmp/given/kubeconfig"]
        # Neither outlives the one that started it.
        alone = ("setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork")
        with subprocess.Popen(
            [*alone, "--kill-child", "sh", "-c", script, "sh", *variables, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ) as process:
            try:
                yield Started(process, log)
            finally:
                process.kill()
                process.wait(END_S)


def check(build: Build, target: Target, names: list[str], given: Path, report: Report) -> None:
    """Start each entry point of an image, and report what the image is."""
    facts = build.facts(target)
    log = given.parent / "log"
    for name in names:
        with reserve_port("127.0.0.1", 0) as held:
            words, url = words_of(name, held.getsockname()[1], "/tmp/given/model")
            command = [*facts.config["Entrypoint"], *words]
            with started(build, target, given, command, log) as one:
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
    target: Target, names: list[str], small: Build, given: Path, record_property: Report
) -> None:
    check(small, target, names, given, record_property)
    assert sum(small.facts(target).sizes[1:]) < MOST_BYTES


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_image_with_torch_starts_as_any_user_with_a_read_only_root(
    given: Path, record_property: Report
) -> None:
    needs("cluster")
    install_needed(print_progress)
    check(
        build_torch(print_progress), TORCH, ["torch decode", "sim decode"], given, record_property
    )


@pytest.mark.parametrize("target", [OPERATOR, ROUTER, SIM], ids=lambda one: one.name)
def test_an_image_holds_what_its_dockerfile_adds_and_nothing_else(
    target: Target, small: Build
) -> None:
    """Two COPY below /opt/baton; so no user either."""
    assert len(small.facts(target).layers) == 3
    with small.files_of(target) as root:
        assert ":65532:" not in (root / "etc" / "passwd").read_text()
        assert [one.name for one in (root / "opt").iterdir()] == ["baton"]
        assert not (root / "src").exists()
        assert not (root / "wheels").exists()


@pytest.mark.parametrize("target", [OPERATOR, ROUTER, SIM], ids=lambda one: one.name)
def test_bytecode_in_an_image_names_its_source_by_hash_and_so_no_time_of_the_build(
    target: Target, small: Build
) -> None:
    """The second word of such a file: 0 is a time, 1 a hash that nobody looks at, 3 one that is."""
    with small.files_of(target) as root:
        compiled = list((root / "opt" / "baton").rglob("*.pyc"))
        kinds = {int.from_bytes(one.read_bytes()[4:8], "little") for one in compiled}
    assert len(compiled) > 500
    assert kinds == {3}


def test_only_tmp_can_be_written(small: Build, given: Path, tmp_path: Path) -> None:
    shell = "id -u; true > /tmp/new && echo written; true > /opt/baton/new; true > /new; echo end"
    log = tmp_path / "log"
    with started(small, SIM, given, ["sh", "-c", shell], log) as one:
        one.wait()
    told = one.log().splitlines()
    assert told[:2] == [str(UNKNOWN_UID), "written"]
    assert told[-1] == "end"
    assert one.log().count("Read-only file system") == 2, told
