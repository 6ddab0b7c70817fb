"""Wrong GGUF files give one clear line, in bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton_engine.config.families import read_config
from baton_engine.errors import EngineError, ModelError
from baton_engine.weights.checkpoint import read_entries, weight_files
from baton_text.artifacts import ArtifactError, read_artifacts
from baton_text.chat import ChatTemplate
from baton_text.tokenizer import Tokenizer
from tests.support.engines.gguf_bytes import (
    ARRAY,
    F32,
    METADATA,
    Q8_0,
    STRING,
    TENSORS,
    File,
    TensorBytes,
)

HUGE = 1 << 60
MOST_BYTES = 16 << 20


def changed(**metadata: Any) -> File:
    values = {key.replace("__", "."): value for key, value in metadata.items()}
    return File(metadata={**METADATA, **values})


def without(key: str) -> File:
    return File(metadata={name: value for name, value in METADATA.items() if name != key})


def with_tensor(*tensors: TensorBytes) -> File:
    return File(tensors=(*TENSORS, *tensors))


def array(item: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, item, count) + data


def load(path: Path) -> None:
    """All that reads a header."""
    read_config(path)
    read_entries(path)
    artifacts = read_artifacts(path)
    Tokenizer.from_artifacts(artifacts)
    ChatTemplate.from_artifacts(artifacts)


def test_a_right_file_is_read(tmp_path: Path) -> None:
    path = File().write(tmp_path / "model.gguf")
    load(path)
    config = read_config(path)
    assert (config.vocab_size, config.num_layers, config.head_dim) == (6, 1, 16)
    tokenizer = Tokenizer.from_artifacts(read_artifacts(path))
    assert tokenizer.encode("abc</s>") == [4, 2, 3, 5]
    assert tokenizer.eos_ids == (5,)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (File(magic=b"GGML"), "is no GGUF file: it does not begin with b'GGUF'"),
        (File(version=1), "has version 1; supported: 2, 3"),
        (File(version=3 << 24), "has version 50331648; supported"),
        (File(entry_count=HUGE), f"{HUGE} metadata entries, more than its bytes hold"),
        (File(tensor_count=HUGE), f"{HUGE} tensors, more than its bytes hold"),
        (File(tensor_count=60), "has  with 0 dimensions; expected 1 to 4"),
        (File(entry_count=17, more=struct.pack("<Q", HUGE)), f"has a name of {HUGE} bytes"),
        (changed(x=struct.pack("<IQ", STRING, HUGE)), f"damaged: {HUGE} bytes follow byte"),
        (changed(x=array(STRING, HUGE)), f"{HUGE} values of x, more than its bytes hold"),
        (changed(x=array(12, HUGE)), f"{HUGE} values of x, more than its bytes hold"),
        (changed(x=array(ARRAY, 1)), "has x, an array of type 9; expected numbers or strings"),
        (changed(x=struct.pack("<I", 77)), "has x of the unknown type 77"),
        (changed(x=struct.pack("<IQB", STRING, 1, 255)), "has x with bytes that are no UTF-8"),
        (changed(split__count=3), "is one of 3 parts .* and one of 1 by its name; parts are named"),
        (changed(general__alignment=24), "has general.alignment 24; expected a power of 2"),
        (changed(general__architecture="mamba"), "'mamba' is not supported; supported: llama, q"),
        (changed(general__architecture=7), "general.architecture is 7; expected a string"),
        (without("general.architecture"), "general.architecture None is not supported"),
        (without("llama.block_count"), "has no llama.block_count"),
        (changed(llama__block_count="1"), "llama.block_count is '1'; expected one integer"),
        (changed(llama__block_count=0), "llama.block_count is 0; expected an integer from 1"),
        (changed(llama__block_count=1 << 30), "num_hidden_layers is 1073741824; expected"),
        (changed(llama__attention__head_count=[2, 1]), r"head_count is \[2, 1\]; .* all layers"),
        (changed(llama__attention__value_length=8), "value_length is 8; expected 16, the size"),
        (changed(llama__attention__layer_norm_rms_epsilon=-1.0), "is -1.0; expected a positive"),
        (changed(llama__rope__scaling__type="su"), "type is 'su'; expected none, linear or yarn"),
        (changed(llama__expert_count=2), "has no llama.expert_used_count"),
        (changed(tokenizer__ggml__model="bert"), "model is 'bert'; expected gpt2 or llama"),
        (changed(tokenizer__ggml__pre="xyz"), "pre is 'xyz'; expected one of .*llama-bpe"),
        (changed(tokenizer__ggml__merges=["a x"]), "merges is 'a x'; expected two tokens that"),
        (changed(tokenizer__ggml__tokens=[1, 2]), "tokens is .*; expected an array of strings"),
        (changed(tokenizer__ggml__token_type=[1]), "expected an array of 6 numbers"),
        (changed(tokenizer__ggml__eos_token_id=6), "is 6; expected the id of one of 6 tokens"),
        (without("tokenizer.ggml.bos_token_id"), "begin with BOS, and there is no"),
        (with_tensor(TensorBytes("x", (32,), 20)), "has x of type IQ4_NL, which is not supp"),
        (with_tensor(TensorBytes("x", (32,), 99)), "has x of type 99, .*supported: F32, F16, Q4"),
        (with_tensor(TensorBytes("x", (48,), Q8_0)), "first a multiple of 32"),
        (with_tensor(TensorBytes("x", (1,) * 5, F32)), "has x with 5 dimensions; expected 1 to 4"),
        (with_tensor(TensorBytes("x", (HUGE, HUGE), F32, offset=0)), "is truncated: it has"),
        (with_tensor(TensorBytes("x", (8,), F32, offset=8)), "at 8, which is no multiple of 32"),
        (with_tensor(TensorBytes("x", (8,), F32, offset=0)), "inside the bytes of"),
        (with_tensor(TENSORS[0]), "has the tensor 'token_embd.weight' twice"),
        (with_tensor(TensorBytes("a\nb", (8,), F32)), r"has the name 'a\\nb', which is not print"),
        (File(tensors=TENSORS[1:]), "has no tensor token_embd.weight with two dimensions"),
        (with_tensor(TensorBytes("rope_freqs.weight", (8,), F32)), "numbers that are not positi"),
        (with_tensor(TensorBytes("rope_freqs.weight", (9,), F32)), r"shape \[9\] .*F32 \[8\]"),
    ],
)
def test_the_error_names_the_value(file: File, message: str, tmp_path: Path) -> None:
    path = file.write(tmp_path / "model.gguf")
    with pytest.raises((ModelError, ArtifactError), match=message) as raised:
        load(path)
    assert str(path) in str(raised.value) or "config.json" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=pytest.mark.long)])
def test_truncated_and_changed_files_give_errors_in_bounded_memory(
    count: int, tmp_path: Path
) -> None:
    content = File().content()
    path = tmp_path / "model.gguf"
    rng = random.Random(0)
    refused = 0
    tracemalloc.start()
    try:
        for number in range(count):
            path.write_bytes(_mutated(content, rng, number))
            message = _refusal(path)
            assert "\n" not in message
            refused += message != ""
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert refused > count // 2


def _refusal(path: Path) -> str:
    try:
        load(path)
    except (EngineError, ArtifactError) as error:
        return str(error)
    return ""


def _mutated(content: bytes, rng: random.Random, number: int) -> bytes:
    header = len(content) // 8
    at = rng.randrange(4, header)
    if number % 4 == 0:
        return content[: rng.randrange(len(content))]
    if number % 4 == 1:
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    if number % 4 == 2:
        wrong = rng.choice((0, 1, 255, 1 << 31, 1 << 40, (1 << 64) - 1))
        return content[:at] + struct.pack("<Q", wrong) + content[at + 8 :]
    return content[:at] + content[at + rng.randrange(1, 9) :]


def part_name(number: int) -> str:
    return f"model-{number + 1:05}-of-00003.gguf"


def write_parts(folder: Path, wrong: Mapping[str, Any]) -> Path:
    """The model in three files, of which `wrong` is metadata of the second. The first is given."""
    for number, tensors in enumerate((TENSORS[:4], TENSORS[4:5], TENSORS[5:])):
        own = {"split.no": number, "split.count": 3, "split.tensors.count": len(TENSORS)}
        metadata = {**METADATA, **own} if number == 0 else own
        if number == 1:
            metadata = {**metadata, **wrong}
        File(metadata=metadata, tensors=tensors).write(folder / part_name(number))
    return folder / part_name(0)


def test_a_file_in_parts_is_the_same_model(tmp_path: Path) -> None:
    whole, first = File().write(tmp_path / "model.gguf"), write_parts(tmp_path, {})
    load(first)
    assert read_config(first) == read_config(whole)
    files = weight_files(first)
    assert [file.name for file in files] == [part_name(number) for number in range(3)]
    found = [(each.name, each.dtype, each.shape) for file in files for each in read_entries(file)]
    assert found == [(each.name, each.dtype, each.shape) for each in read_entries(whole)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / part_name(2)).unlink(), "first of 3 parts, and .*3-of.* missing"),
        (lambda folder: write_parts(folder, {"split.no": 2}), "split.no 2 and .* expected 1 and 3"),
        (lambda folder: write_parts(folder, {"split.count": 4}), "split.count 4; expected 1 and 3"),
        (
            lambda folder: File(
                metadata={"split.no": 1, "split.count": 3}, tensors=TENSORS[3:5]
            ).write(folder / part_name(1)),
            "which another part of model-00001-of-00003.gguf has, too",
        ),
        (
            lambda folder: File(metadata={"split.no": 1, "split.count": 3}, tensors=()).write(
                folder / part_name(1)
            ),
            "have 10 tensors; split.tensors.count is 11: they are not the parts of one model",
        ),
        (
            lambda folder: (folder / part_name(1)).replace(folder / part_name(0)),
            "has split.no 1 and split.count 3; expected 0 and 3",
        ),
    ],
)
def test_missing_and_mixed_parts_are_refused(
    change: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    first = write_parts(tmp_path, {})
    change(tmp_path)
    with pytest.raises(ModelError, match=message):
        read_config(first)


def test_another_part_than_the_first_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path, {})
    with pytest.raises(ModelError, match=r"a part of a model; give the first, model-00001-of-"):
        read_config(tmp_path / part_name(1))


def test_long_strings_are_not_in_errors(tmp_path: Path) -> None:
    path = changed(general__architecture="x" * 100_000).write(tmp_path / "model.gguf")
    with pytest.raises(ModelError) as raised:
        read_config(path)
    assert len(str(raised.value)) < 400
