"""The bar of LLM.generate on stderr: prompts done, and input and output tokens per second so far.

In: after each step, what has been done since the start. Out: a tqdm bar, as vLLM's users know it.
`use_tqdm` is True, False, or what makes the bar, such as a subclass of tqdm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

UseTqdm = bool | Callable[..., Any]
SHOW_EVERY_S = 0.1


class ProgressBar:
    """A context manager, which closes the bar even after an error."""

    def __init__(
        self, use_tqdm: UseTqdm, prompts: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._began = self._shown = clock()
        self._bar: Any = None
        if not use_tqdm:
            return
        if callable(use_tqdm):
            make: Callable[..., Any] = use_tqdm
        else:
            from tqdm.auto import tqdm

            make = tqdm
        self._bar = make(
            total=prompts, desc="Processed prompts", dynamic_ncols=True, postfix=_speeds(0, 0, 1.0)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, ended: int, inputs: int, outputs: int) -> None:
        """`ended` requests have ended since the last call. `inputs` and `outputs` are the tokens of
        prompts and answers since the start."""
        if self._bar is None:
            return
        now = self._clock()
        if ended or now - self._shown >= SHOW_EVERY_S:
            self._shown = now
            text = _speeds(inputs, outputs, max(now - self._began, 1e-9))
            self._bar.set_postfix_str(text, refresh=not ended)
            self._bar.update(ended)


def _speeds(inputs: int, outputs: int, seconds: float) -> str:
    return f"input: {inputs / seconds:.2f} tokens/s, output: {outputs / seconds:.2f} tokens/s"
