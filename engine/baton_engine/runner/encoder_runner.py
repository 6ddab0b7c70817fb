"""EncoderRunner: computes the prompts of a step on an encoder (interface.Runner).

In: rows of whole prompts. Out: their answers, in the order of the call. Each prompt is computed
alone, so its answer's bits do not depend on the others. Nothing is written to the blocks of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton_engine.interface import ComputedStep, Launched, Row, RowResult
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.runner.model_runner import tried_twice
from baton_engine.vectors import answer_of

if TYPE_CHECKING:
    from baton_engine.models.bridge.encoders.model import EncoderModel


class EncoderRunner:
    def __init__(self, model: EncoderModel, memory: TorchMemory) -> None:
        self.memory = memory
        self._model = model

    def launch(self, rows: Sequence[Row]) -> Launched:
        """Raises OutOfMemory if the device lacks memory for one of the prompts."""
        return tried_twice(lambda: ComputedStep([self._answer(row) for row in rows]))

    def _answer(self, row: Row) -> RowResult:
        assert row.pooling is not None, "an encoder's row is a whole prompt"
        assert row.start == 0, "an encoder's row is a whole prompt"
        numbers_N = self._model.answer(row.tokens, row.pooling.second_text)
        pooling = self._model.config.pooling
        return RowResult(vector=answer_of(numbers_N.cpu().numpy(), pooling, row.pooling))
