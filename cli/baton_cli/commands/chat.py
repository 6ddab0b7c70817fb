"""`baton chat`: a chat with the model of a running pool.

In: ChatOptions; lines of a terminal, or one question on a pipe. Out: answers as they arrive. Where
stdin or stdout is no terminal, the question is all of stdin, and stdout has the answer alone.
"""

from __future__ import annotations

import sys
from contextlib import closing

from baton_cli.commands.router_options import ChatOptions
from baton_cli.errors import CommandError
from baton_cli.terminal.chat_session import ChatSession
from baton_cli.terminal.conversation import Conversation, ask
from baton_cli.terminal.remote_router import RemoteRouter
from baton_cli.terminal.text import visible


def run(options: ChatOptions) -> int:
    router = RemoteRouter(options.url, options.api_key)
    conversation = Conversation(options.system)
    if sys.stdin.isatty() and sys.stdout.isatty():
        import readline  # gives input() its keys and its history

        # Pasted lines are one question. Python switches this off; libedit does not know it.
        readline.parse_and_bind("set enable-bracketed-paste on")
        ChatSession(router, conversation, options.max_tokens, sys.stdout, input).run()
    else:
        answer_once(router, conversation, options.max_tokens)
    return 0


def answer_once(router: RemoteRouter, conversation: Conversation, max_tokens: int | None) -> None:
    """Answer the question on stdin. Raise CommandError, also for half an answer."""
    try:
        question = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise CommandError(f"the question on stdin is not text: {error}") from error
    if not question:
        raise CommandError("stdin has no question; as in: echo 'What is a KV cache?' | baton chat")
    with closing(ask(router, conversation.messages(question), max_tokens)) as answer:
        for piece in answer.pieces():
            if piece.kind == "answer":
                sys.stdout.write(visible(piece.text))
                sys.stdout.flush()
        if not answer.text.endswith("\n"):
            sys.stdout.write("\n")
