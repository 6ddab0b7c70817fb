"""The engine's errors: in a model or its settings, found before the engine runs, and in a step.

    EngineError
    |-- SettingsError       an option's value cannot work on this machine or for this model
    |-- ModelError          the folder has no model that can be served
    |   |-- UnsupportedModel   an unsupported architecture or feature; the message names the value
    |   `-- WeightsError       tensors are missing, left over or of the wrong shape
    |-- OutOfMemory         a step needs more memory than the device has; a smaller one may fit
    |-- EngineBusy          requests or transfers are in flight, so the engine cannot sleep
    |-- EngineAsleep        the engine sleeps, so it computes nothing
    `-- PinRefused          a prefix that the cache may not, or cannot, keep

Each message is one line with the offending value and what to do.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors of this package."""


class SettingsError(EngineError):
    pass


class ModelError(EngineError):
    pass


class UnsupportedModel(ModelError):
    pass


class WeightsError(ModelError):
    pass


class OutOfMemory(EngineError):
    """The step was not launched, and the runner's state is as before."""


class EngineBusy(EngineError):
    """Nothing has changed."""


class EngineAsleep(EngineError):
    """Nothing has changed."""


class PinRefused(EngineError):
    """Nothing has changed."""
