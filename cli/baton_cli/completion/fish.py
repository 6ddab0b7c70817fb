"""The script for fish: one `complete` per command and flag, each with its condition."""

from __future__ import annotations

from collections.abc import Sequence

from baton_cli.completion.words import CommandWords, FlagWords, groups

HEAD = """\
# Completion of `baton` for fish: baton completion fish > ~/.config/fish/completions/baton.fish

function __baton_command -d 'the command on the line, of one or two words'
    set -l words (commandline -opc)
    set -e words[1]
    switch "$words[1]"
        case {groups}
            echo "$words[1..2]"
        case '*'
            echo "$words[1]"
    end
end

function __baton_is
    test "$argv" = (__baton_command)
end

complete -c baton -f
"""


def script(commands: Sequence[CommandWords]) -> str:
    heads = groups()
    lines = [_word("", group.name, group.about) for group in heads]
    for command in commands:
        *before, last = command.words
        lines.append(_word(" ".join(before), last, command.about))
        words = " ".join(command.words)
        lines += [_word(words, argument, "") for argument in command.arguments]
        lines += [line for flag in command.flags for line in _flag(words, flag)]
    head = HEAD.replace("{groups}", " ".join(group.name for group in heads))
    return head + "\n".join(lines) + "\n"


def _at(words: str) -> str:
    return f"complete -c baton -n {_quoted(f'__baton_is {words or _quoted(words)}')}"


def _word(before: str, word: str, about: str) -> str:
    return f"{_at(before)} -a {_quoted(word)} -d {_quoted(about)}"


def _flag(words: str, flag: FlagWords) -> list[str]:
    values = {
        "nothing": "",
        "choice": f" -x -a {_quoted(' '.join(flag.choices))}",
        "path": " -r -F",
        "text": " -x",
    }
    return [
        f"{_at(words)} -l {name.removeprefix('--')} -d {_quoted(flag.about)}{values[flag.takes]}"
        for name in flag.names
    ]


def _quoted(text: str) -> str:
    """Single quotes of fish, in which a backslash escapes a quote and itself."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
