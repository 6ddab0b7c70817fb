"""The main of a node's engine process: python -m baton_cli.engine_process FD PARENT_PID

The process's life is `baton_node.engine.main`. Its step loop works with the classes of both roles,
whatever the node's role, so it is put together here, where both can be imported.
"""

from __future__ import annotations

import sys

from baton_decode_node.fetcher import Fetcher
from baton_decode_node.write_behind import WriteBehind
from baton_node.engine.grammar_compiler import GrammarCompiler
from baton_node.engine.loop import EngineLoop
from baton_node.engine.loop_context import LoopContext
from baton_node.engine.main import run_engine_process
from baton_node.engine.outgoing_blocks import OutgoingBlocks
from baton_node.engine.running_batch import RunningBatch
from baton_prefill_node.publisher import Publisher


def build_loop(context: LoopContext, compiler: GrammarCompiler) -> EngineLoop:
    """Build the step loop, which is the same for both roles."""
    outgoing = OutgoingBlocks(context)
    publisher = Publisher(context, outgoing)
    write_behind = WriteBehind(context, outgoing)
    batch = RunningBatch(context, publisher, write_behind)
    fetcher = Fetcher(context, batch)
    return EngineLoop(context, batch, fetcher, publisher, write_behind, outgoing, compiler)


def main(arguments: list[str]) -> int:
    return run_engine_process(arguments, build_loop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
