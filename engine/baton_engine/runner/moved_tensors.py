"""Move all tensors of a model to host memory, and back to where the model finds them.

In: an object that refers to tensors, in attributes, collections, closures. Out: their memory on the
device freed, their bytes in host memory. A tensor and its views share a storage, which stays the
same object: it is emptied, and later gets new memory, at another address. Whatever recorded an
address, such as a CUDA graph, must be made again.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# What refers to everything: a module or a class leads from one model to all others.
SHARED = (types.ModuleType, type, types.FrameType, types.CodeType)


@dataclass(frozen=True, slots=True)
class MovedTensors:
    """The storages of tensors, and their bytes in host memory."""

    storages: list[tuple[torch.UntypedStorage, torch.Tensor]]

    @classmethod
    def of(cls, owner: object, *, pinned: bool = False) -> MovedTensors:
        """Move every tensor that `owner` refers to."""
        storages = {}
        for tensor in tensors_of(owner):
            if tensor.is_mkldnn:  # on CPUs only, where nothing is moved
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage
        moved = []
        for storage in storages.values():
            kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            kept.copy_(_as_bytes(storage))
            storage.resize_(0)
            moved.append((storage, kept))
        return cls(moved)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for _, kept in self.storages)

    def move_back(self) -> None:
        """Give the storages memory again. The bytes in host memory are freed one by one."""
        while self.storages:
            storage, kept = self.storages.pop()
            storage.resize_(kept.nbytes)
            _as_bytes(storage).copy_(kept)


def tensors_of(owner: object) -> Iterator[torch.Tensor]:
    """Every tensor that `owner` refers to, also over several objects; each once."""
    seen: set[int] = set()
    found: list[object] = [owner]
    while found:
        item = found.pop()
        if id(item) in seen or isinstance(item, SHARED) or _is_of_a_module(item):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        found += _referents(item)


def _is_of_a_module(item: object) -> bool:
    """Whether it is a module's dict of globals, which a compiled kernel refers to."""
    return isinstance(item, dict) and "__spec__" in item


def _referents(item: object) -> list[Any]:
    """What an object refers to; a function's globals do not belong to it."""
    if isinstance(item, types.FunctionType):
        return [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
    return gc.get_referents(item)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
