"""The class of a scheduler, by name: another package's, in place of Baton's own."""

from __future__ import annotations

from importlib import import_module

from baton_engine.errors import SettingsError
from baton_engine.scheduling.scheduler import Scheduler


def scheduler_class(name: str | None) -> type[Scheduler]:
    """The class that --scheduler-cls names as "module:Class"; None is Baton's own. Raises
    SettingsError if it cannot be imported, or is no subclass of Scheduler."""
    if name is None:
        return Scheduler
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise SettingsError(f"--scheduler-cls {name} is not of the form MODULE:CLASS")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"--scheduler-cls {name} cannot be imported: {error}; install its package where the"
            " engine runs"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise SettingsError(
            f"--scheduler-cls {name} is no subclass of baton_engine.scheduling.scheduler.Scheduler"
        )
    return found
