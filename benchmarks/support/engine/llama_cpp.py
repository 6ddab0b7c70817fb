"""llama.cpp as a side of a CPU benchmark, if `make peers` has installed it.

In: a GGUF file. Out: tokens per second of a prompt and of its answer.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.kv.peers import PYTHON
from benchmarks.support.rivals import PEERS, takes_part

END_S = 10.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second."""

    prompt: float
    decode: float


class LlamaCpp:
    """In a process of its own, idle while others have their turn."""

    def __init__(self, file: Path, threads: int, tokens: int) -> None:
        """The file is open afterwards, and may be removed. A prompt with its answer has at most
        `tokens` tokens."""
        worker = Path(__file__).with_name("llama_cpp_worker.py")
        self._process = subprocess.Popen(
            [str(PYTHON), str(worker), str(file), str(threads), str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        found = self._answer()
        able = (part.split(" = ")[0] for part in found["system"].split(" | ") if " = 1" in part)
        self.name = f"xllamacpp {found['version']} ({', '.join(able).replace('CPU : ', '')})"

    def run(self, prompt: list[int], new_tokens: int) -> Rates:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return Rates(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp's process ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Its standard input's end is its own."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)


def llama_cpp_takes_part(*, asked: bool) -> bool:
    """Whether llama.cpp is compared. Raise SystemExit if it was asked for and is not there."""
    there = bool([*PEERS.parent.glob("lib/python*/site-packages/xllamacpp")])
    return takes_part("llama.cpp", PEERS, there=there, asked=asked)
