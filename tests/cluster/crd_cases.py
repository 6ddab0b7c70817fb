"""Pools as users should not write them, for the API server to refuse.

In: nothing. Out: `BAD`: what is refused, the field that is named and what is to be written instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Spec = dict[str, Any]
SIM: Spec = {"engine": {"kind": "sim"}}
DATA = ["redis://kv-0", "redis://kv-1"]


class Bad(NamedTuple):
    """`field` and `remedy` are parts of the one line that speaks of it."""

    title: str
    spec: Any
    field: str
    remedy: str
    name: str = "demo"


def model(**fields: Any) -> Spec:
    return {"model": fields}


def engine(**fields: Any) -> Spec:
    return {"engine": {"kind": "sim", **fields}}


def prefill(**fields: Any) -> Spec:
    return SIM | {"prefill": fields}


def resources(requests: Spec, limits: Spec) -> Spec:
    return prefill(resources={"requests": requests, "limits": limits})


def router(**fields: Any) -> Spec:
    return SIM | {"router": fields}


def managed(**fields: Any) -> Spec:
    return SIM | {"kvStore": {"managed": fields}}


def external(index: Any = "redis://index", data: Any = DATA, **fields: Any) -> Spec:
    return SIM | {"kvStore": {"external": {"indexUrl": index, "dataUrls": data, **fields}}}


def clients(*peers: Spec) -> Spec:
    return SIM | {"networkPolicy": {"clients": list(peers)}}


HUB = "write hf://ORG/NAME[@REVISION]"
CLAIM = "write pvc://CLAIM/FOLDER"
NAME = "write small letters, digits, '-' and '.'"
POOL_NAME = "write at most 40 of a-z, 0-9 and '-', a letter first"
FLAG = "write --NAME=VALUE or --NAME"
OWN_FLAG = "leave it out and write the spec's own field"
QUANTITY = "such as 2, 500m, 512Mi or 16Gi"
URL = "write redis://HOST[:PORT][/DB], or rediss://"
LOGIN = "leave it out and write secretRef"
ONE_OF = "write one of the two"

BAD: tuple[Bad, ...] = (
    Bad("no spec", None, "spec", "write at least model.path, model.uri or engine.kind: sim"),
    Bad("an empty spec", {}, "spec.model", "write path or uri, or engine.kind: sim"),
    Bad("a spec that is a list", [], "spec", "must be of type object"),
    Bad("an empty path", model(path=""), "spec.model", "write path or uri"),
    Bad("a relative path", model(path="m/x"), "spec.model.path", "write one that begins with '/'"),
    Bad("path and uri", model(path="/m", uri="hf://a/b"), "spec.model.uri", ONE_OF),
    Bad("a bucket", model(uri="s3://bucket/m"), "spec.model.uri", HUB),
    Bad("a path as uri", model(uri="/models/m"), "spec.model.uri", HUB),
    Bad("a web address", model(uri="https://hub.example/org/m"), "spec.model.uri", HUB),
    Bad("a repository too deep", model(uri="hf://a/b/c"), "spec.model.uri", HUB),
    Bad("no repository", model(uri="hf://"), "spec.model.uri", HUB),
    Bad("an empty revision", model(uri="hf://org/m@"), "spec.model.uri", HUB),
    Bad("a claim in capitals", model(uri="pvc://Models/m"), "spec.model.uri", CLAIM),
    Bad("a way out of the claim", model(uri="pvc://models/../x"), "spec.model.uri", CLAIM),
    Bad("two words as name", model(path="/m", name="my model"), "spec.model.name", "write letters"),
    Bad(
        "a login for a folder",
        model(path="/m", secretRef={"name": "hub"}),
        "spec.model.secretRef",
        "write uri: hf://ORG/NAME, or leave it out",
    ),
    Bad(
        "a cache for a claim",
        model(uri="pvc://models/m", cache={"claimName": "c"}),
        "spec.model.cache",
        "write uri: hf://ORG/NAME, or leave it out",
    ),
    Bad(
        "an empty cache",
        model(uri="hf://a/b", cache={}),
        "spec.model.cache",
        "write one of claimName and hostPath",
    ),
    Bad(
        "two caches",
        model(uri="hf://a/b", cache={"claimName": "c", "hostPath": "/c"}),
        "spec.model.cache",
        "write one of claimName and hostPath",
    ),
    Bad(
        "a relative cache",
        model(uri="hf://a/b", cache={"hostPath": "cache"}),
        "spec.model.cache.hostPath",
        "write one that begins with '/'",
    ),
    Bad(
        "a cache and storage",
        model(uri="hf://a/b", cache={"claimName": "c"}, storage="1Gi"),
        "spec.model.storage",
        "write uri: hf://ORG/NAME without cache",
    ),
    Bad(
        "storage for a claim",
        model(uri="pvc://models/m", storage="1Gi"),
        "spec.model.storage",
        "write uri: hf://ORG/NAME without cache",
    ),
    Bad("odd storage", model(uri="hf://a/b", storage="1GiB"), "spec.model.storage", QUANTITY),
    Bad(
        "a claim's odd name",
        model(uri="hf://a/b", cache={"claimName": "My_Claim"}),
        "spec.model.cache.claimName",
        NAME,
    ),
    Bad(
        "a secret without name",
        model(uri="hf://a/b", secretRef={}),
        "spec.model.secretRef.name",
        "Required value",
    ),
    Bad(
        "a secret's odd name",
        model(uri="hf://a/b", secretRef={"name": "hub token"}),
        "spec.model.secretRef.name",
        NAME,
    ),
    Bad("another engine", engine(kind="vllm"), "spec.engine.kind", '"sim", "torch"'),
    Bad("a type of ours not", engine(dtype="fp8"), "spec.engine.dtype", '"auto", "bfloat16"'),
    Bad("empty blocks", engine(blockSize=0), "spec.engine.blockSize", "greater than or equal to 1"),
    Bad("half a block", engine(blockSize=1.5), "spec.engine.blockSize", "type integer"),
    Bad("no chunk", engine(chunkBlocks=0), "spec.engine.chunkBlocks", "greater than or equal to 1"),
    Bad("no length", engine(maxModelLen=0), "spec.engine.maxModelLen", "greater than or equal"),
    Bad("a huge length", engine(maxModelLen=1 << 40), "spec.engine.maxModelLen", "format int32"),
    Bad("two words", engine(extraArgs=["--kv-blocks", "9"]), "spec.engine.extraArgs[1]", FLAG),
    Bad("a short flag", engine(extraArgs=["-v"]), "spec.engine.extraArgs[0]", FLAG),
    Bad("a flag with blank", engine(extraArgs=["--kv-blocks 9"]), "spec.engine.extraArgs", FLAG),
    Bad("our port", engine(extraArgs=["--port=1"]), "spec.engine.extraArgs[0]", OWN_FLAG),
    Bad("plain logs", engine(extraArgs=["--no-json-logs"]), "spec.engine.extraArgs", OWN_FLAG),
    Bad("a token", engine(extraArgs=["--link-token=x"]), "spec.engine.extraArgs", OWN_FLAG),
    Bad("a typo", SIM | {"prefil": {}}, 'unknown field "spec.prefil"', "unknown field"),
    Bad(
        "a deep typo",
        SIM | {"decode": {"replica": 2}},
        'unknown field "spec.decode.replica"',
        "unknown field",
    ),
    Bad("text for a number", prefill(replicas="two"), "spec.prefill.replicas", "type integer"),
    Bad("less than nothing", prefill(replicas=-1), "spec.prefill.replicas", "greater than or"),
    Bad(
        "nobody to answer",
        SIM | {"prefill": {"replicas": 0}, "decode": {"replicas": 0}},
        "spec.decode.replicas",
        "write at least 1 in one of them",
    ),
    Bad(
        "a unit of ours not",
        resources({}, {"memory": "1GiB"}),
        "spec.prefill.resources.limits[memory]",
        QUANTITY,
    ),
    Bad(
        "less than no CPU",
        resources({"cpu": -1}, {}),
        "spec.prefill.resources.requests[cpu]",
        QUANTITY,
    ),
    Bad(
        "a request above its limit",
        resources({"memory": "2Gi"}, {"memory": "1Gi"}),
        "spec.prefill.resources.requests",
        "write a request that is at most the limit",
    ),
    Bad(
        "a CPU above its limit",
        resources({"cpu": 2}, {"cpu": "1500m"}),
        "spec.prefill.resources.requests",
        "write a request that is at most the limit",
    ),
    Bad(
        "a pod's spec one level up",
        prefill(podTemplate={"nodeSelector": {"gpu": "yes"}}),
        'unknown field "spec.prefill.podTemplate.nodeSelector"',
        "unknown field",
    ),
    Bad("no router", router(replicas=0), "spec.router.replicas", "greater than or equal to 1"),
    Bad("a port too high", router(service={"port": 70000}), "spec.router.service.port", "65535"),
    Bad("port 0", router(service={"port": 0}), "spec.router.service.port", "or equal to 1"),
    Bad(
        "an external name",
        router(service={"type": "ExternalName"}),
        "spec.router.service.type",
        '"ClusterIP", "LoadBalancer", "NodePort"',
    ),
    Bad(
        "two ways in",
        router(ingress={"host": "a.example"}, httpRoute={"parentRefs": [{"name": "gate"}]}),
        "spec.router.httpRoute",
        ONE_OF,
    ),
    Bad("an ingress for all", router(ingress={}), "spec.router.ingress.host", "Required value"),
    Bad(
        "a host with port",
        router(ingress={"host": "a.example:80"}),
        "spec.router.ingress.host",
        "without a port",
    ),
    Bad(
        "an odd class",
        router(ingress={"host": "a.example", "className": "My Class"}),
        "spec.router.ingress.className",
        NAME,
    ),
    Bad(
        "a route from nowhere",
        router(httpRoute={"parentRefs": []}),
        "spec.router.httpRoute.parentRefs",
        "at least 1 item",
    ),
    Bad(
        "an address as host",
        router(httpRoute={"parentRefs": [{"name": "gate"}], "hostnames": ["http://a.example"]}),
        "spec.router.httpRoute.hostnames[0]",
        "write one such as llm.example.com",
    ),
    Bad("our sharing", router(extraArgs=["--sharing=pool"]), "spec.router.extraArgs", OWN_FLAG),
    Bad(
        "tenants that nothing tells apart",
        SIM | {"kvStore": {"sharing": "tenant"}},
        "spec.kvStore.sharing",
        "write router.apiKeysSecret, or sharing: pool",
    ),
    Bad(
        "another sharing",
        SIM | {"kvStore": {"sharing": "user"}},
        "spec.kvStore.sharing",
        '"pool", "tenant"',
    ),
    Bad(
        "keys of no key",
        router(apiKeysSecret={"name": "tenants"}),
        "spec.router.apiKeysSecret.key",
        "Required value",
    ),
    Bad(
        "keys' odd name",
        router(apiKeysSecret={"name": "My Keys", "key": "a"}),
        "spec.router.apiKeysSecret.name",
        NAME,
    ),
    Bad(
        "keys in a folder",
        router(apiKeysSecret={"name": "tenants", "key": "a/b"}),
        "spec.router.apiKeysSecret.key",
        "write letters, digits and any of . _ -",
    ),
    Bad("our hand-off", router(extraArgs=["--handoff=never"]), "spec.router.extraArgs", OWN_FLAG),
    Bad("no flag", router(extraArgs=["handoff"]), "spec.router.extraArgs[0]", FLAG),
    Bad("a store's odd size", managed(memory="1GiB"), "spec.kvStore.managed.memory", QUANTITY),
    Bad("a tiny store", managed(memory="1Mi"), "spec.kvStore.managed.memory", "at least 64Mi"),
    Bad("bytes too few", managed(memory=1000), "spec.kvStore.managed.memory", "at least 64Mi"),
    Bad(
        "a server's memory that its values fill",
        managed(memory="2Gi", dataResources={"limits": {"memory": "2Gi"}}),
        "spec.kvStore.managed.dataResources",
        "write more than kvStore.managed.memory",
    ),
    Bad(
        "an index without memory",
        managed(indexResources={"limits": {"memory": "128Mi"}}),
        "spec.kvStore.managed.indexResources",
        "write more than 128Mi",
    ),
    Bad(
        "a server's request above its limit",
        managed(indexResources={"requests": {"cpu": 2}, "limits": {"cpu": 1}}),
        "spec.kvStore.managed.indexResources.requests",
        "write a request that is at most the limit",
    ),
    Bad(
        "no instance",
        managed(dataInstances=0),
        "spec.kvStore.managed.dataInstances",
        "greater than or equal to 1",
    ),
    Bad(
        "too many instances",
        managed(dataInstances=65),
        "spec.kvStore.managed.dataInstances",
        "less than or equal to 64",
    ),
    Bad(
        "two stores",
        SIM | {"kvStore": {"managed": {}, **external()["kvStore"]}},
        "spec.kvStore.external",
        ONE_OF,
    ),
    Bad("no scheme", external("index:6379"), "spec.kvStore.external.indexUrl", URL),
    Bad("a socket", external("unix:///run/redis"), "spec.kvStore.external.indexUrl", URL),
    Bad("options", external("rediss://i?ssl_x=1"), "spec.kvStore.external.indexUrl", URL),
    Bad(
        "an index missing",
        SIM | {"kvStore": {"external": {"dataUrls": DATA}}},
        "spec.kvStore.external.indexUrl",
        "Required value",
    ),
    Bad("no data", external(data=[]), "spec.kvStore.external.dataUrls", "at least 1 item"),
    Bad(
        "two in one",
        external(data=["redis://a,redis://b"]),
        "spec.kvStore.external.dataUrls[0]",
        URL,
    ),
    Bad("one for both", external(DATA[0]), "spec.kvStore.external.dataUrls", "another server"),
    Bad(
        "one server, two databases",
        external("redis://kv-0:6379/1", ["redis://kv-1:6379", "redis://kv-0:6379"]),
        "spec.kvStore.external.dataUrls",
        "write another server",
    ),
    Bad(
        "one twice",
        external(data=[*DATA, DATA[0]]),
        "spec.kvStore.external.dataUrls",
        "write each once",
    ),
    Bad("a login", external("redis://u:geheim@i"), "spec.kvStore.external.indexUrl", LOGIN),
    Bad(
        "a password",
        external(data=["redis://:geheim@d"]),
        "spec.kvStore.external.dataUrls",
        LOGIN,
    ),
    Bad(
        "a CA without TLS",
        external(caSecretRef={"name": "ca"}),
        "spec.kvStore.external.caSecretRef",
        "write rediss://... URLs, or leave it out",
    ),
    Bad("a wrong hand-off", SIM | {"handoff": "maybe"}, "spec.handoff", '"always", "auto"'),
    Bad(
        "a wrong policy",
        SIM | {"missingRolePolicy": "wait"},
        "spec.missingRolePolicy",
        '"aggregate", "fail", "queue"',
    ),
    Bad(
        "a queue before nobody",
        SIM | {"missingRolePolicy": "queue", "decode": {"replicas": 0}},
        "spec.missingRolePolicy",
        "write aggregate, or at least 1 in decode.replicas",
    ),
    Bad(
        "prompts for nobody",
        SIM | {"missingRolePolicy": "fail", "prefill": {"replicas": 0}},
        "spec.missingRolePolicy",
        "write aggregate, or at least 1 in decode.replicas and, without handoff: never, in prefill",
    ),
    Bad(
        "addresses with labels",
        clients({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}),
        "spec.networkPolicy.clients[0].ipBlock",
        "write two peers",
    ),
    Bad(
        "addresses in namespaces",
        clients({"ipBlock": {"cidr": "10.0.0.0/8"}, "namespaceSelector": {}}),
        "spec.networkPolicy.clients[0].ipBlock",
        "write two peers",
    ),
    Bad(
        "no time to start",
        engine(startTimeoutSeconds=9),
        "spec.engine.startTimeoutSeconds",
        "greater than or equal to 10",
    ),
    Bad(
        "nobody as client",
        clients({}),
        "spec.networkPolicy.clients[0]",
        "write podSelector, namespaceSelector or ipBlock",
    ),
    Bad("yes as truth", SIM | {"paused": "yes"}, "spec.paused", "type boolean"),
    Bad("a digit first", SIM, "metadata.name", POOL_NAME, name="1st"),
    Bad("a dot", SIM, "metadata.name", POOL_NAME, name="a.b"),
    Bad("a long name", SIM, "metadata.name", POOL_NAME, name="a" * 41),
)
