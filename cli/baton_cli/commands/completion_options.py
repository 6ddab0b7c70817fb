"""Flags of `baton completion`: the shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_cli.options.records import CommonOptions
from baton_protocol.options import option

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(CommonOptions):
    TITLE = "completion"

    shell: Shell = option("bash", "bash, zsh or fish", metavar="SHELL", positional=True)
