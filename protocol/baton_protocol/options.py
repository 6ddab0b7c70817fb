"""Declares an option once: its default, help text, bounds, flag and secrecy.

In: a frozen dataclass whose options are fields made by `option()`. Out: what is known of each. The
command line makes flags and environment variables of it and checks their values
(`baton_cli.options.flag`), an engine checks its own, and docs/reference/flags.md is written from
it.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any

# The type of options that are written as 1GiB or 512MiB.
ByteSize = Annotated[int, "bytes"]
MAX_PORT = 65535
_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of an option beside its field's name, type and default.

    flag          its name, if not the field's: --NAME
    short         a shorter name of the flag: -N
    metavar       the name of the value in --help
    least, most   inclusive bounds of the value
    excludes      the flag's name, with underscores, that may not be given together with this one
    hidden        no variable, and no line in --help
    secret        may hold a password: left out of repr, and passed to children by variable only
    positional    a required argument without a flag
    bare          its value if the flag is given without one; "": it needs one
    several       takes several words, and may be repeated
    """

    help: str
    flag: str = ""
    short: str = ""
    metavar: str = ""
    least: float | None = None
    most: float | None = None
    excludes: str = ""
    hidden: bool = False
    secret: bool = False
    positional: bool = False
    several: bool = False
    bare: str = ""


def option(
    default: Any,
    help: str,
    *,
    flag: str = "",
    short: str = "",
    metavar: str = "",
    least: float | None = None,
    most: float | None = None,
    excludes: str = "",
    hidden: bool = False,
    secret: bool = False,
    positional: bool = False,
    several: bool = False,
    bare: str = "",
) -> Any:
    """A dataclass field that users set; the arguments are those of Option."""
    declared = Option(
        help=help,
        flag=flag,
        short=short,
        metavar=metavar,
        least=least,
        most=most,
        excludes=excludes,
        hidden=hidden,
        secret=secret,
        positional=positional,
        several=several,
        bare=bare,
    )
    return field(default=default, metadata={_KEY: declared}, repr=not secret)


def option_of(item: Field[Any]) -> Option | None:
    """The option that a field declares; None for a field that users cannot set."""
    return item.metadata.get(_KEY)


def values_of(settings: Any, *records: type) -> dict[str, Any]:
    """The values that `settings` has for the fields of these dataclasses, as keyword arguments."""
    return {
        item.name: getattr(settings, item.name) for record in records for item in fields(record)
    }
