"""Errors in a model or its settings that are found before the engine runs.

    EngineError
    |-- SettingsError       an option's value cannot work on this machine or for this model
    `-- ModelError          the folder has no model that can be served
        |-- UnsupportedModel   an unsupported architecture or feature; the message names the value
        `-- WeightsError       tensors are missing, left over or of the wrong shape

Each message is one line with the offending value and what to do.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that a user can correct before the engine starts."""


class SettingsError(EngineError):
    pass


class ModelError(EngineError):
    pass


class UnsupportedModel(ModelError):
    pass


class WeightsError(ModelError):
    pass
