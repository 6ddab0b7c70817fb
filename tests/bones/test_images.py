"""The Dockerfiles follow the project's rules, and `make images` runs the available builder.

No image is built here: tests/cluster/test_images.py builds the images and runs them.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.needs import needs
from tests.support.project.dockerfiles import Stage, in_context, lineage, stages_of

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = {room: (ROOT / room / "Dockerfile").read_text() for room in ("node", "router", "operator")}
TARGETS = [("node", "sim"), ("node", "cpu"), ("node", "cuda"), ("router", ""), ("operator", "")]
# The requirements file of each stage that installs one. test_requirements.py checks these files.
PACKAGES = {
    ("operator", "packages"): "operator/requirements.txt",
    ("router", "packages"): "router/requirements.txt",
    ("node", "packages-sim"): "node/requirements-sim.txt",
    ("node", "packages-cpu"): "node/requirements.txt",
    ("node", "packages-cuda"): "node/requirements.txt",
}
PINNED = re.compile(r"[a-z0-9./-]+:\d+\.\d+\.\d+[a-z0-9.-]*@sha256:[0-9a-f]{64}")
PATTERNS = [
    line
    for line in (ROOT / ".dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]


def target(room: str, name: str) -> list[Stage]:
    """The image's final stage, then the stages that it is based on."""
    stages = stages_of(FILES[room])
    [final] = [one for one in stages if one.name == name]
    return list(lineage(stages, final))


def pip_commands(room: str, *subcommands: str) -> list[list[str]]:
    """The arguments of each pip command that contains one of `subcommands`."""
    runs = [text for stage in stages_of(FILES[room]) for text in stage.texts("RUN")]
    commands = [command.split() for run in runs for command in run.split("&&")]
    pips = [command for command in commands if command[0] == "pip" and {*subcommands} & {*command}]
    assert pips
    return pips


@pytest.mark.parametrize("room", FILES)
def test_every_stage_is_based_on_another_stage_or_an_image_pinned_by_digest(room: str) -> None:
    stages = stages_of(FILES[room])
    names = {one.name for one in stages}
    for stage in stages:
        assert stage.image in names or PINNED.fullmatch(stage.image), stage.image


@pytest.mark.parametrize("room", FILES)
def test_the_base_image_is_named_once_and_can_be_replaced(room: str) -> None:
    """`--build-arg BASE=...` replaces it. The cluster tests do so, without a registry."""
    assert len(re.findall("python:", FILES[room])) == 1
    assert re.search(r"^ARG BASE=python:\S+$", FILES[room], re.MULTILINE)


def test_all_images_have_the_same_supported_python() -> None:
    bases = {one.image for text in FILES.values() for one in stages_of(text) if ":" in one.image}
    [base] = bases
    version = base.partition(":")[2].partition("-")[0]
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(version)


@pytest.mark.parametrize(("room", "name"), TARGETS)
def test_an_image_runs_as_an_unprivileged_user(room: str, name: str) -> None:
    final = target(room, name)[0]
    assert final.instructions[-1].word in {"USER", "CMD"}
    assert final.texts("USER") == ["65532:65532"]


@pytest.mark.parametrize(("room", "name"), TARGETS)
def test_an_image_does_not_request_gpus(room: str, name: str) -> None:
    """With NVIDIA's runtime as the default, NVIDIA_VISIBLE_DEVICES would give it every GPU."""
    variables = " ".join(text for stage in target(room, name) for text in stage.texts("ENV"))
    assert "PATH=/opt/baton/bin" in variables
    assert "NVIDIA_VISIBLE_DEVICES" not in variables


@pytest.mark.parametrize(("room", "name"), TARGETS)
def test_an_image_is_labelled_with_baton_s_version(room: str, name: str) -> None:
    labels = " ".join(text for stage in target(room, name) for text in stage.texts("LABEL"))
    assert f'image.version="{PROJECT["project"]["version"]}"' in labels
    assert f'image.title="baton-{room}"' in labels


@pytest.mark.parametrize(("room", "name"), TARGETS)
def test_an_image_holds_no_build_tool(room: str, name: str) -> None:
    """Its stages only copy files from build stages, in which pip keeps no cache."""
    for stage in target(room, name):
        assert stage.texts("RUN") == []
        for text in stage.texts("COPY"):
            assert text.startswith("--from=")
    for command in pip_commands(room, "install", "wheel"):
        assert "--no-cache-dir" in command


@pytest.mark.parametrize("room", FILES)
def test_every_copied_path_exists(room: str) -> None:
    stages = stages_of(FILES[room])
    for stage in stages:
        for text in stage.texts("COPY"):
            *sources, _ = [word for word in text.split() if not word.startswith("--")]
            origin = re.match(r"--from=(\S+)", text)
            if origin:
                assert origin[1] in {one.name for one in stages}
            else:
                assert [one for one in sources if not (ROOT / one).exists()] == []


def test_the_build_context_holds_exactly_the_wheel_s_sources() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    wanted = ["pyproject.toml", "README.md", "LICENSE", "constraints.txt"]
    wanted += ["requirements-build.txt", *PACKAGES.values()]
    wanted += [f"{package}/py.typed" for package in packages]
    assert [one for one in wanted if not in_context(PATTERNS, one)] == []
    rooms = {package.split("/")[0] for package in packages}
    others = [one.name for one in ROOT.iterdir() if one.is_dir() and one.name not in rooms]
    unwanted = [f"{folder}/some/file.py" for folder in others]
    unwanted += ["Makefile", "cli/baton/__pycache__/main.cpython-311.pyc", "router/Dockerfile"]
    assert [one for one in unwanted if in_context(PATTERNS, one)] == []


@pytest.mark.parametrize(("room", "name"), PACKAGES)
def test_an_image_installs_exactly_its_requirements_file(room: str, name: str) -> None:
    stages = stages_of(FILES[room])
    [stage] = [one for one in stages if one.name == name]
    [copied] = stage.texts("COPY")
    file = PACKAGES[room, name]
    assert copied.split()[0] == file
    [run] = stage.texts("RUN")
    assert f"--require-hashes -r /{file.rpartition('/')[2]}" in run
    assert any(f"--from={name} " in text for one in stages for text in one.texts("COPY"))


@pytest.mark.parametrize("room", FILES)
def test_only_baton_is_installed_without_hashes(room: str) -> None:
    """Packages come as wheels only: a source archive would run an unpinned build backend. The next
    test checks the values of "$@"."""
    for command in pip_commands(room, "install"):
        if command[-1] == "/wheels/baton_serve-*.whl":
            assert "--no-deps" in command
        else:
            assert "--only-binary=:all:" in command
            assert "--require-hashes" in command or (room == "node" and command[-1] == '"$@"')


@pytest.mark.integration
@pytest.mark.parametrize(
    ("index", "arguments"),
    [
        ("", ["--require-hashes", "-r", "/requirements.txt"]),
        (
            "https://torch.example/cpu",
            [
                *("--extra-index-url", "https://torch.example/cpu"),
                *("-c", "/constraints.txt", "llvmlite", "numba", "safetensors", "torch"),
                "transformers",
            ],
        ),
    ],
)
def test_torch_is_installed_by_hash_unless_another_index_is_given(
    index: str, arguments: list[str], tmp_path: Path
) -> None:
    [stage] = [one for one in stages_of(FILES["node"]) if one.name == "packages-cpu"]
    [run] = stage.texts("RUN")
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    pip.chmod(0o755)
    done = subprocess.run(
        ["sh", "-ec", run],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "TORCH_INDEX": index},
        capture_output=True,
        text=True,
        check=True,
    )
    called = done.stdout.splitlines()
    assert called[called.index("install") + 1 :] == [
        "--no-cache-dir",
        "--only-binary=:all:",
        *arguments,
    ]


@pytest.mark.parametrize("room", FILES)
def test_bytecode_in_an_image_does_not_depend_on_the_build_time(room: str) -> None:
    """With SOURCE_DATE_EPOCH, bytecode holds its source's hash instead of a time. It is also the
    time of all files in the wheel."""
    for stage in stages_of(FILES[room]):
        if stage.texts("RUN") and stage.image.startswith("python:"):
            assert stage.texts("ENV") == ["SOURCE_DATE_EPOCH=1580601600"]


@pytest.mark.parametrize(("room", "name"), TARGETS)
def test_a_source_change_rebuilds_only_the_last_layer(room: str, name: str) -> None:
    """Only the stage `baton` sees the sources, and only the last copy depends on that stage."""
    stages = stages_of(FILES[room])
    sees_sources = [one.name for one in stages if ". ." in one.texts("COPY")]
    assert sees_sources == ["baton"]
    *others, last = target(room, name)[0].texts("COPY")
    assert last == "--from=baton /opt/baton /opt/baton"
    assert others
    assert not any("--from=baton" in text for text in others)


def test_the_stage_that_builds_baton_is_the_same_for_all_images() -> None:
    """A builder then builds it once."""
    instructions = {
        one.instructions
        for text in FILES.values()
        for one in stages_of(text)
        if one.name == "baton"
    }
    assert len(instructions) == 1


def make_images(folder: Path, builders: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run `make images` with scripts as builders; return its exit code and all output."""
    needs("make")
    for name, script in builders.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    done = subprocess.run(
        ["make", "images", *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.integration
def test_make_images_uses_the_first_builder_that_runs(tmp_path: Path) -> None:
    scripts = {"docker": "exit 1", "podman": 'echo "podman $*"', "buildah": "exit 1"}
    arguments = ["IMAGE_PREFIX=registry.example/team", "IMAGE_TAG=1.2.3"]
    code, printed = make_images(tmp_path, scripts, *arguments)
    assert code == 0, printed
    built = re.findall(r"^podman build .*-f (\S+) .*-t (\S+)", printed, re.MULTILINE)
    assert built == [
        ("operator/Dockerfile", "registry.example/team/baton-operator:1.2.3"),
        ("router/Dockerfile", "registry.example/team/baton-router:1.2.3"),
        ("node/Dockerfile", "registry.example/team/baton-sim:1.2.3"),
        ("node/Dockerfile", "registry.example/team/baton-node:1.2.3"),
        ("node/Dockerfile", "registry.example/team/baton-node:1.2.3-cuda"),
    ]


@pytest.mark.integration
def test_image_names_match_the_chart(tmp_path: Path) -> None:
    flavours = "NODE_FLAVOURS=sim cpu"
    code, printed = make_images(tmp_path, {"docker": 'echo "docker $*"'}, flavours)
    assert code == 0, printed
    version = PROJECT["project"]["version"]
    names = re.findall(r"^docker build .*-t (\S+)", printed, re.MULTILINE)
    assert names == [f"baton-{room}:{version}" for room in ("operator", "router", "sim", "node")]


@pytest.mark.integration
def test_make_images_without_a_builder_names_the_missing_programs(tmp_path: Path) -> None:
    scripts = dict.fromkeys(("docker", "podman", "buildah"), "exit 1")
    code, printed = make_images(tmp_path, scripts)
    assert code != 0
    assert "docker, podman and buildah are missing here, or none of them can run" in printed


@pytest.mark.integration
def test_a_failed_build_ends_make_images(tmp_path: Path) -> None:
    code, printed = make_images(tmp_path, {"docker": '[ "$1" = info ] || exit 3'})
    assert code != 0
    assert printed.count("build -f") == 1
