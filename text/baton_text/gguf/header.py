"""Reads the header of a GGUF file: its metadata and where each tensor is. No tensor's bytes.

A model may be in several files, NAME-00001-of-00003.gguf and so on. The first has the metadata and
stands for all.

A header is magic, version, number of tensors, number of metadata entries; then the entries (key,
type, value), then the tensors (name, dimensions with the innermost first, type, offset). The
tensors' bytes begin at the next multiple of `general.alignment`.

Sizes in a file may be wrong. Nothing is allocated by a size before the bytes are known to be there,
and at most MOST_BYTES of header and MOST_ITEMS values are read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import IO, Any

from baton_protocol.model_source import GGUF_SUFFIX

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# The largest vocabularies, with merges, take some 20 MB and 1.5 million values.
MOST_BYTES = 128 << 20
MOST_ITEMS = 1 << 22
MOST_DIMENSIONS = 4
MOST_NAME = 1024  # bytes of a key or of a tensor's name
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
# How many parts there are, and the number of this one from 0 on.
PARTS_KEY, PART_KEY = "split.count", "split.no"
PARTS_TENSORS_KEY = "split.tensors.count"
PART_NAME = re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(GGUF_SUFFIX)}")
STRING, ARRAY, BOOL = 8, 9, 7
# Type of a value -> its format for struct.
NUMBERS: Mapping[int, str] = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B"},
    **{10: "Q", 11: "q", 12: "d"},
}
# Types of tensors that are not read, by their number.
UNSUPPORTED: Mapping[int, str] = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
# The arrays of these keys are long, and only a tokenizer needs them.
TOKENIZER = "tokenizer."


@dataclass(frozen=True, slots=True)
class TensorType:
    """`block` successive numbers of a row take `size` bytes."""

    name: str
    block: int
    size: int


# By the number of the type in files. Names are those of llama.cpp.
TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}


class GgufError(Exception):
    """A file is no GGUF file, is damaged, or has something that is not supported. The message names
    the file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` has the innermost dimension last. The bytes are those of `path` from `begin` to
    `end`."""

    path: Path
    name: str
    type: TensorType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def is_gguf(model: Path) -> bool:
    """Whether the model is one file, and not a folder."""
    return model.suffix == GGUF_SUFFIX and model.is_file()


def part_files(path: Path) -> list[Path]:
    """The files of the model of which `path` is one, by their names."""
    found = PART_NAME.fullmatch(path.name)
    if found is None:
        return [path]
    name, _, count = found.groups()
    numbers = range(1, max(1, int(count)) + 1)
    return [path.with_name(f"{name}-{number:05}-of-{count}{GGUF_SUFFIX}") for number in numbers]


def read_header(path: Path, *, tokenizer: bool = False) -> Header:
    """The first part's metadata and the tensors of all parts. Without `tokenizer`, the metadata
    lacks the tokenizer's arrays. Raises GgufError."""
    first = _read_file(path, tokenizer)
    count, files = first.metadata.get(PARTS_KEY, 0), part_files(path)
    if count in (0, 1) and len(files) == 1:
        return first
    if count != len(files):
        raise GgufError(
            f"{path} is one of {shown(count)} parts ({PARTS_KEY}), and one of {len(files)} by its"
            " name; parts are named NAME-00001-of-00003.gguf and so on"
        )
    if path != files[0]:
        raise GgufError(f"{path} is a part of a model; give the first, {files[0].name}")
    tensors: dict[str, Tensor] = {}
    for number, file in enumerate(files):
        if not file.is_file():
            raise GgufError(f"{path} is the first of {count} parts, and {file.name} is missing")
        part = first if number == 0 else _read_file(file, tokenizer=False)
        found = part.metadata.get(PART_KEY), part.metadata.get(PARTS_KEY)
        if found != (number, count):
            raise GgufError(
                f"{file} has {PART_KEY} {shown(found[0])} and {PARTS_KEY} {shown(found[1])};"
                f" expected {number} and {count}"
            )
        if both := tensors.keys() & part.tensors.keys():
            raise GgufError(f"{file} has {min(both)}, which another part of {path.name} has, too")
        tensors.update(part.tensors)
    total = first.metadata.get(PARTS_TENSORS_KEY, len(tensors))
    if total != len(tensors):
        raise GgufError(
            f"{path} and its parts have {len(tensors)} tensors; {PARTS_TENSORS_KEY} is"
            f" {shown(total)}: they are not the parts of one model"
        )
    return Header(path, first.metadata, tensors)


def _read_file(path: Path, tokenizer: bool) -> Header:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _Reader(path, file, size).header(tokenizer)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error}") from error


def shown(value: object) -> str:
    """The value for an error: on one line, and short also for a long list or text."""
    short = Repr()
    short.maxstring = short.maxother = 60
    return short.repr(value)


class _Reader:
    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._at = self._items = 0

    def header(self, tokenizer: bool) -> Header:
        if self._size < len(MAGIC) or self._bytes(len(MAGIC)) != MAGIC:
            raise GgufError(f"{self._path} is no GGUF file: it does not begin with {MAGIC!r}")
        version = self._number("I")
        if version not in VERSIONS:
            # A file for big-endian machines has the version's bytes in the other order.
            raise self._wrong(f"has version {version}; supported: {', '.join(map(str, VERSIONS))}")
        tensor_count, entry_count = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(self._count(entry_count, 12, "metadata entries")):
            key = self._name()
            if key in metadata:
                raise self._wrong(f"has the key {shown(key)} twice")
            keep = tokenizer or not key.startswith(TOKENIZER)
            value = self._value(self._number("I"), key, keep)
            if value is not None:
                metadata[key] = value
        return Header(self._path, metadata, self._tensors(tensor_count, metadata))

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> Mapping[str, Tensor]:
        described = []
        for _ in range(self._count(count, 24, "tensors")):
            name = self._name()
            described.append((name, *self._shape_and_type(name), self._number("Q")))
        alignment = metadata.get(ALIGNMENT_KEY, ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"has {ALIGNMENT_KEY} {shown(alignment)}; expected a power of 2")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in described:
            size = math.prod(shape) // kind.block * kind.size
            begin = base + offset
            if name in tensors:
                raise self._wrong(f"has the tensor {shown(name)} twice")
            if offset % alignment:
                raise self._wrong(f"has {name} at {offset}, which is no multiple of {alignment}")
            if begin + size > self._size:
                raise self._wrong(
                    f"is truncated: it has {self._size} bytes, and {name} ends at byte "
                    f"{begin + size}"
                )
            tensors[name] = Tensor(self._path, name, kind, shape, begin, begin + size)
        self._check_overlap(tensors)
        return tensors

    def _shape_and_type(self, name: str) -> tuple[tuple[int, ...], TensorType]:
        dimensions = self._number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self._wrong(
                f"has {name} with {dimensions} dimensions; expected 1 to {MOST_DIMENSIONS}"
            )
        sizes = [self._number("Q") for _ in range(dimensions)]
        number = self._number("I")
        if number not in TYPES:
            supported = ", ".join(kind.name for kind in TYPES.values())
            raise self._wrong(
                f"has {name} of type {UNSUPPORTED.get(number, number)}, which is not supported; "
                f"supported: {supported}"
            )
        kind = TYPES[number]
        if not all(sizes) or sizes[0] % kind.block:
            raise self._wrong(
                f"has {name} of {kind.name} with the dimensions {sizes}; expected positive ones, "
                f"the first a multiple of {kind.block}"
            )
        return tuple(reversed(sizes)), kind

    def _check_overlap(self, tensors: Mapping[str, Tensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda each: each.begin):
            if tensor.begin < end:
                raise self._wrong(f"has {tensor.name} inside the bytes of {before}")
            end, before = tensor.end, tensor.name

    def _value(self, kind: int, key: str, keep: bool) -> Any:
        if kind in NUMBERS:
            number = self._number(NUMBERS[kind])
            return bool(number) if kind == BOOL else number
        if kind == STRING:
            return self._text(key)
        if kind != ARRAY:
            raise self._wrong(f"has {key} of the unknown type {kind}")
        item, count = self._number("I"), self._number("Q")
        if item in NUMBERS:
            size = struct.calcsize(NUMBERS[item])
            self._count(count, size, f"values of {key}")
            data = self._bytes(count * size)
            return list(struct.unpack(f"<{count}{NUMBERS[item]}", data)) if keep else None
        if item != STRING:
            raise self._wrong(f"has {key}, an array of type {item}; expected numbers or strings")
        self._count(count, 8, f"values of {key}")
        if keep:
            return [self._text(key) for _ in range(count)]
        for _ in range(count):
            self._bytes(self._number("Q"))
        return None

    def _text(self, key: str) -> str:
        try:
            return self._bytes(self._number("Q")).decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"has {key} with bytes that are no UTF-8: {error}") from error

    def _name(self) -> str:
        size = self._number("Q")
        if size > MOST_NAME:
            raise self._wrong(f"has a name of {size} bytes; at most {MOST_NAME} are allowed")
        try:
            name = self._bytes(size).decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"has a name that is no UTF-8: {error}") from error
        if not name.isprintable():
            raise self._wrong(f"has the name {shown(name)}, which is not printable")
        return name

    def _count(self, count: int, least_bytes: int, what: str) -> int:
        """The number of things that take at least this number of bytes each."""
        self._items += count
        if self._items > MOST_ITEMS or count * least_bytes > self._left():
            raise self._wrong(
                f"has a header with {count} {what}, more than its bytes hold or {MOST_ITEMS} allow"
            )
        return count

    def _number(self, form: str) -> Any:
        [number] = struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))
        return number

    def _bytes(self, size: int) -> bytes:
        if size > self._left():
            raise self._wrong(
                f"is truncated or damaged: {size} bytes follow byte {self._at} of its header, and "
                f"there are {self._left()}"
            )
        data = self._file.read(size)
        if len(data) < size:
            raise self._wrong("changed while it was read")
        self._at += size
        return data

    def _left(self) -> int:
        """Bytes that the header may still have."""
        return min(self._size, MOST_BYTES) - self._at

    def _wrong(self, what: str) -> GgufError:
        return GgufError(f"{self._path} {what}")
