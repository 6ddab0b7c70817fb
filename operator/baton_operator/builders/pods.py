"""What the pods of nodes, router and Redis have in common.

In: a container, built by its own module. Out: pod templates, probes, command lines.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton_operator.builders.child import Child, Manifest

DRAIN_S = 60  # running answers after SIGTERM: 2,000 tokens at 30 ms each
STOP_S = 15  # then: leave the registry, end the engine, close links; normally 2 s


def pod_template(child: Child, container: Manifest, grace_s: int) -> Manifest:
    """One container, no token for the API, no variables about the namespace's services."""
    return {
        "metadata": {"labels": child.labels()},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_s,
            "containers": [container],
        },
    }


def http_container(name: str, image: str, words: list[str], port: int) -> Manifest:
    """A `baton` process. It answers /health as soon as it listens, long before a model is loaded;
    /ready says whether it would serve, and only keeps clients away."""
    return {
        "name": name,
        "image": image,
        "command": ["baton"],
        "args": words,
        "ports": [{"name": "http", "containerPort": port}],
        "livenessProbe": _get("/health") | {"periodSeconds": 10, "timeoutSeconds": 5},
        "readinessProbe": _get("/ready") | {"periodSeconds": 2, "timeoutSeconds": 2},
    }


def flags(values: Mapping[str, str | int | None]) -> list[str]:
    """Each as one word; None leaves the flag out. Kubernetes puts variables in for $(NAME) in
    arguments, and $$ is how it spells a dollar."""
    given = {name: str(value) for name, value in values.items() if value is not None}
    return [f"--{name}={value.replace('$', '$$')}" for name, value in given.items()]


def _get(path: str) -> Manifest:
    return {"httpGet": {"path": path, "port": "http"}}
