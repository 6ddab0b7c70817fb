"""What can be wrong with a model or its settings before the engine runs.

    EngineError
    |-- SettingsError       a flag's value cannot work on this machine or for this model
    `-- ModelError          the folder holds nothing servable
        |-- UnsupportedModel   an architecture or feature we do not compute; the value is named
        `-- WeightsError       tensors missing, left over or of the wrong shape

Each message is one line: the offending value and what to do.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that a user can correct before the engine starts."""


class SettingsError(EngineError):
    pass


class ModelError(EngineError):
    pass


class UnsupportedModel(ModelError):
    pass


class WeightsError(ModelError):
    pass
