"""A cluster's API as the user's kubectl reaches it.

In: the context and the namespace that the user gave, if any. Out: objects as JSON, and port
forwards. kubectl is there, because it starts this plugin, and it has the user's login, also one
that a program of a cloud provides. So the plugin may do exactly what its user may do.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from baton_cli.errors import CommandError

Json = dict[str, Any]

ANSWER_S = 60.0
FORWARD_S = 30.0
LOOK_S = 0.02
_FORWARDED = re.compile(r"^Forwarding from 127\.0\.0\.1:(\d+) ", re.MULTILINE)
_MISSING = "kubectl is not on the PATH: install it, and call this as `kubectl baton`"


@dataclass(frozen=True)
class Cluster:
    """`namespace` and `context` are "" for those of the kubeconfig."""

    namespace: str = ""
    context: str = ""

    def read(self, *words: str) -> Json:
        """The JSON of `kubectl get`. Raise CommandError with kubectl's message."""
        command = [*self._kubectl(), "get", *words, "--output=json"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=ANSWER_S, check=False
            )
        except FileNotFoundError as error:
            raise CommandError(_MISSING) from error
        except subprocess.TimeoutExpired as error:
            raise CommandError(
                f"kubectl did not answer within {ANSWER_S:g} s; check the cluster of --context"
            ) from error
        if done.returncode:
            raise CommandError(_last_line(done.stderr) or f"kubectl ended with {done.returncode}")
        return dict(json.loads(done.stdout))

    @contextmanager
    def forward(self, pod: str, port: int) -> Iterator[str]:
        """The URL of a pod's port, while the block runs. Raise CommandError with kubectl's
        message."""
        words = ("port-forward", "--address=127.0.0.1", f"pod/{pod}", f":{port}")
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as problems:
            try:
                forward = subprocess.Popen(
                    [*self._kubectl(), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=problems,
                )
            except FileNotFoundError as error:
                raise CommandError(_MISSING) from error
            try:
                yield f"http://127.0.0.1:{_wait_for_port(forward, out, problems)}"
            finally:
                forward.kill()
                forward.wait()

    def _kubectl(self) -> list[str]:
        flags = (("--namespace", self.namespace), ("--context", self.context))
        return ["kubectl", *(f"{name}={value}" for name, value in flags if value)]


def _wait_for_port(forward: subprocess.Popen[bytes], out: IO[str], problems: IO[str]) -> int:
    until = time.monotonic() + FORWARD_S
    while time.monotonic() < until:
        ended = forward.poll() is not None
        if found := _FORWARDED.search(_content(out)):
            return int(found[1])
        if ended:
            break
        time.sleep(LOOK_S)
    why = _last_line(_content(problems)) or f"kubectl opened no port within {FORWARD_S:g} s"
    raise CommandError(f"no port forward to the router: {why}")


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
