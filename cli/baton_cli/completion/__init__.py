"""`baton completion`: scripts with which shells complete the command line.

words            the commands, their flags and the values of these, from the table of commands
bash, zsh, fish  the script for each shell

The scripts hold all words: a press of Tab starts no Python.
"""

from __future__ import annotations

import sys

from baton_cli.commands.completion_options import CompletionOptions
from baton_cli.completion import bash, fish, zsh
from baton_cli.completion.words import command_words

SCRIPTS = {"bash": bash.script, "fish": fish.script, "zsh": zsh.script}


def run(options: CompletionOptions) -> int:
    sys.stdout.write(SCRIPTS[options.shell](command_words()))
    return 0
