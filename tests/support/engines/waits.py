"""Finds operations that make the host wait for a GPU, without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

# Copies to and from memory that is not pinned. Torch waits for them, and so for all work before.
COPIES = {
    *(torch.tensor, torch.as_tensor, torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu),
    *(torch.Tensor.tolist, torch.Tensor.numpy),
}
# Operations whose result is a number on the host, or has a shape that depends on values.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero"}


class Copies(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in COPIES:
            self._found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if name in READS or masks:
            self._found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[list[str]]:
    """The operations that would make the host wait for a GPU. Kernels are not run."""
    found: list[str] = []
    no_launch = mock.patch.object(KernelInterface, "__getitem__", return_value=mock.Mock())
    with no_launch, Copies(found), Reads(found):
        yield found
