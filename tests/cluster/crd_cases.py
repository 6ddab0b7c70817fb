"""Invalid pools that the API server must refuse.

In: nothing. Out: `BAD`: specs, with the field and the remedy that each refusal must name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Spec = dict[str, Any]
SIM: Spec = {"engine": {"kind": "sim"}}
DATA = ["redis://kv-0", "redis://kv-1"]


class Bad(NamedTuple):
    """An invalid pool. One line of the refusal must contain both `field` and `remedy`."""

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
NAME = "write lowercase letters, digits, '-' and '.'"
POOL_NAME = "write at most 40 of a-z, 0-9 and '-', starting with a letter"
FLAG = "write --NAME=VALUE or --NAME"
OWN_FLAG = "leave it out and write the field of the spec"
QUANTITY = "such as 2, 500m, 512Mi or 16Gi"
URL = "write redis://HOST[:PORT][/DB], or rediss://"
LOGIN = "leave it out and write secretRef"
ONE_OF = "write one of the two"

BAD: tuple[Bad, ...] = (
    Bad("no spec", None, "spec", "write at least model.path, model.uri or engine.kind: sim"),
    Bad("an empty spec", {}, "spec.model", "write path or uri, or engine.kind: sim"),
    Bad("a spec that is a list", [], "spec", "must be of type object"),
    Bad("an empty path", model(path=""), "spec.model", "write path or uri"),
    Bad("a relative path", model(path="m/x"), "spec.model.path", "write one that starts with '/'"),
    Bad("path and uri", model(path="/m", uri="hf://a/b"), "spec.model.uri", ONE_OF),
    Bad("a bucket", model(uri="s3://bucket/m"), "spec.model.uri", HUB),
    Bad("a path as uri", model(uri="/models/m"), "spec.model.uri", HUB),
    Bad("a web address", model(uri="https://hub.example/org/m"), "spec.model.uri", HUB),
    Bad("a repository too deep", model(uri="hf://a/b/c"), "spec.model.uri", HUB),
    Bad("no repository", model(uri="hf://"), "spec.model.uri", HUB),
    Bad("an empty revision", model(uri="hf://org/m@"), "spec.model.uri", HUB),
    Bad("a claim in capitals", model(uri="pvc://Models/m"), "spec.model.uri", CLAIM),
    Bad("a path out of the claim", model(uri="pvc://models/../x"), "spec.model.uri", CLAIM),
    Bad(
        "a model name of two words",
        model(path="/m", name="my model"),
        "spec.model.name",
        "write letters",
    ),
    Bad(
        "a Secret for a local folder",
        model(path="/m", secretRef={"name": "hub"}),
        "spec.model.secretRef",
        "write uri: hf://ORG/NAME, or leave this out",
    ),
    Bad(
        "a cache with a claim",
        model(uri="pvc://models/m", cache={"claimName": "c"}),
        "spec.model.cache",
        "write uri: hf://ORG/NAME, or leave this out",
    ),
    Bad(
        "an empty cache",
        model(uri="hf://a/b", cache={}),
        "spec.model.cache",
        "write claimName or hostPath",
    ),
    Bad(
        "two caches",
        model(uri="hf://a/b", cache={"claimName": "c", "hostPath": "/c"}),
        "spec.model.cache",
        "write claimName or hostPath",
    ),
    Bad(
        "a relative cache",
        model(uri="hf://a/b", cache={"hostPath": "cache"}),
        "spec.model.cache.hostPath",
        "write one that starts with '/'",
    ),
    Bad(
        "a cache and storage",
        model(uri="hf://a/b", cache={"claimName": "c"}, storage="1Gi"),
        "spec.model.storage",
        "write uri: hf://ORG/NAME without cache",
    ),
    Bad(
        "storage with a claim",
        model(uri="pvc://models/m", storage="1Gi"),
        "spec.model.storage",
        "write uri: hf://ORG/NAME without cache",
    ),
    Bad(
        "an invalid storage size",
        model(uri="hf://a/b", storage="1GiB"),
        "spec.model.storage",
        QUANTITY,
    ),
    Bad(
        "an invalid claim name",
        model(uri="hf://a/b", cache={"claimName": "My_Claim"}),
        "spec.model.cache.claimName",
        NAME,
    ),
    Bad(
        "a secret without a name",
        model(uri="hf://a/b", secretRef={}),
        "spec.model.secretRef.name",
        "Required value",
    ),
    Bad(
        "an invalid secret name",
        model(uri="hf://a/b", secretRef={"name": "hub token"}),
        "spec.model.secretRef.name",
        NAME,
    ),
    Bad("an unknown engine", engine(kind="vllm"), "spec.engine.kind", '"sim", "torch"'),
    Bad("an unsupported dtype", engine(dtype="fp8"), "spec.engine.dtype", '"auto", "bfloat16"'),
    Bad(
        "a draft model without a folder",
        engine(speculativeConfig={"method": "draft_model"}),
        "spec.engine.speculativeConfig.model",
        "write the folder of the weights",
    ),
    Bad(
        "an unsupported quantization",
        engine(quantization="int2"),
        "spec.engine.quantization",
        '"fp8", "int4"',
    ),
    Bad("an unknown codec", engine(storeCodec="int4"), "spec.engine.storeCodec", '"int8", "none"'),
    Bad(
        "an unsupported dtype of KV",
        engine(kvCacheDtype="int4"),
        "spec.engine.kvCacheDtype",
        '"auto", "bfloat16"',
    ),
    Bad(
        "a text for batch invariance",
        engine(batchInvariant="on"),
        "spec.engine.batchInvariant",
        "type boolean",
    ),
    Bad(
        "a block size of 0",
        engine(blockSize=0),
        "spec.engine.blockSize",
        "greater than or equal to 1",
    ),
    Bad("a fractional block size", engine(blockSize=1.5), "spec.engine.blockSize", "type integer"),
    Bad(
        "a chunk of 0 blocks",
        engine(chunkBlocks=0),
        "spec.engine.chunkBlocks",
        "greater than or equal to 1",
    ),
    Bad(
        "a model length of 0",
        engine(maxModelLen=0),
        "spec.engine.maxModelLen",
        "greater than or equal",
    ),
    Bad(
        "a model length beyond int32",
        engine(maxModelLen=1 << 40),
        "spec.engine.maxModelLen",
        "format int32",
    ),
    Bad(
        "a flag and its value apart",
        engine(extraArgs=["--kv-blocks", "9"]),
        "spec.engine.extraArgs[1]",
        FLAG,
    ),
    Bad("a short flag", engine(extraArgs=["-v"]), "spec.engine.extraArgs[0]", FLAG),
    Bad("a flag with a blank", engine(extraArgs=["--kv-blocks 9"]), "spec.engine.extraArgs", FLAG),
    Bad(
        "the port as an extra flag",
        engine(extraArgs=["--port=1"]),
        "spec.engine.extraArgs[0]",
        OWN_FLAG,
    ),
    Bad(
        "the log format as an extra flag",
        engine(extraArgs=["--no-json-logs"]),
        "spec.engine.extraArgs",
        OWN_FLAG,
    ),
    Bad(
        "the link token as an extra flag",
        engine(extraArgs=["--link-token=x"]),
        "spec.engine.extraArgs",
        OWN_FLAG,
    ),
    Bad("a typo", SIM | {"prefil": {}}, 'unknown field "spec.prefil"', "unknown field"),
    Bad(
        "a deep typo",
        SIM | {"decode": {"replica": 2}},
        'unknown field "spec.decode.replica"',
        "unknown field",
    ),
    Bad("a text for a number", prefill(replicas="two"), "spec.prefill.replicas", "type integer"),
    Bad("negative replicas", prefill(replicas=-1), "spec.prefill.replicas", "greater than or"),
    Bad(
        "no node at all",
        SIM | {"prefill": {"replicas": 0}, "decode": {"replicas": 0}},
        "spec.decode.replicas",
        "write at least 1 in one of them",
    ),
    Bad(
        "an unknown unit of memory",
        resources({}, {"memory": "1GiB"}),
        "spec.prefill.resources.limits[memory]",
        QUANTITY,
    ),
    Bad(
        "a negative CPU request",
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
    Bad(
        "no router replica",
        router(replicas=0),
        "spec.router.replicas",
        "greater than or equal to 1",
    ),
    Bad("a port too high", router(service={"port": 70000}), "spec.router.service.port", "65535"),
    Bad("port 0", router(service={"port": 0}), "spec.router.service.port", "or equal to 1"),
    Bad(
        "an external name",
        router(service={"type": "ExternalName"}),
        "spec.router.service.type",
        '"ClusterIP", "LoadBalancer", "NodePort"',
    ),
    Bad(
        "an ingress and a route",
        router(ingress={"host": "a.example"}, httpRoute={"parentRefs": [{"name": "gate"}]}),
        "spec.router.httpRoute",
        ONE_OF,
    ),
    Bad(
        "an ingress without a host",
        router(ingress={}),
        "spec.router.ingress.host",
        "Required value",
    ),
    Bad(
        "a host with a port",
        router(ingress={"host": "a.example:80"}),
        "spec.router.ingress.host",
        "without a port",
    ),
    Bad(
        "an invalid ingress class",
        router(ingress={"host": "a.example", "className": "My Class"}),
        "spec.router.ingress.className",
        NAME,
    ),
    Bad(
        "a route without parents",
        router(httpRoute={"parentRefs": []}),
        "spec.router.httpRoute.parentRefs",
        "at least 1 item",
    ),
    Bad(
        "a URL as hostname",
        router(httpRoute={"parentRefs": [{"name": "gate"}], "hostnames": ["http://a.example"]}),
        "spec.router.httpRoute.hostnames[0]",
        "write one such as llm.example.com",
    ),
    Bad(
        "sharing as an extra flag",
        router(extraArgs=["--sharing=pool"]),
        "spec.router.extraArgs",
        OWN_FLAG,
    ),
    Bad(
        "tenant sharing without API keys",
        SIM | {"kvStore": {"sharing": "tenant"}},
        "spec.kvStore.sharing",
        "write router.apiKeysSecret, or sharing: pool",
    ),
    Bad(
        "an unknown sharing",
        SIM | {"kvStore": {"sharing": "user"}},
        "spec.kvStore.sharing",
        '"pool", "tenant"',
    ),
    Bad(
        "API keys without a key of the Secret",
        router(apiKeysSecret={"name": "tenants"}),
        "spec.router.apiKeysSecret.key",
        "Required value",
    ),
    Bad(
        "an invalid name of the API keys' Secret",
        router(apiKeysSecret={"name": "My Keys", "key": "a"}),
        "spec.router.apiKeysSecret.name",
        NAME,
    ),
    Bad(
        "a key of the Secret with a slash",
        router(apiKeysSecret={"name": "tenants", "key": "a/b"}),
        "spec.router.apiKeysSecret.key",
        "write letters, digits and any of . _ -",
    ),
    Bad(
        "the hand-off as an extra flag",
        router(extraArgs=["--handoff=never"]),
        "spec.router.extraArgs",
        OWN_FLAG,
    ),
    Bad(
        "an extra argument that is no flag",
        router(extraArgs=["handoff"]),
        "spec.router.extraArgs[0]",
        FLAG,
    ),
    Bad("an invalid store size", managed(memory="1GiB"), "spec.kvStore.managed.memory", QUANTITY),
    Bad("a tiny store", managed(memory="1Mi"), "spec.kvStore.managed.memory", "at least 64Mi"),
    Bad(
        "a store of 1000 bytes",
        managed(memory=1000),
        "spec.kvStore.managed.memory",
        "at least 64Mi",
    ),
    Bad(
        "a data server's limit that its values fill",
        managed(memory="2Gi", dataResources={"limits": {"memory": "2Gi"}}),
        "spec.kvStore.managed.dataResources",
        "write more than kvStore.managed.memory",
    ),
    Bad(
        "an index server's limit that is too small",
        managed(indexResources={"limits": {"memory": "128Mi"}}),
        "spec.kvStore.managed.indexResources",
        "write more than 128Mi",
    ),
    Bad(
        "an index server's request above its limit",
        managed(indexResources={"requests": {"cpu": 2}, "limits": {"cpu": 1}}),
        "spec.kvStore.managed.indexResources.requests",
        "write a request that is at most the limit",
    ),
    Bad(
        "no data instance",
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
        "a managed and an external store",
        SIM | {"kvStore": {"managed": {}, **external()["kvStore"]}},
        "spec.kvStore.external",
        ONE_OF,
    ),
    Bad(
        "an index URL without a scheme",
        external("index:6379"),
        "spec.kvStore.external.indexUrl",
        URL,
    ),
    Bad(
        "a socket as index URL",
        external("unix:///run/redis"),
        "spec.kvStore.external.indexUrl",
        URL,
    ),
    Bad("options in a URL", external("rediss://i?ssl_x=1"), "spec.kvStore.external.indexUrl", URL),
    Bad(
        "no index URL",
        SIM | {"kvStore": {"external": {"dataUrls": DATA}}},
        "spec.kvStore.external.indexUrl",
        "Required value",
    ),
    Bad("no data URL", external(data=[]), "spec.kvStore.external.dataUrls", "at least 1 item"),
    Bad(
        "two URLs in one item",
        external(data=["redis://a,redis://b"]),
        "spec.kvStore.external.dataUrls[0]",
        URL,
    ),
    Bad(
        "one server as index and data",
        external(DATA[0]),
        "spec.kvStore.external.dataUrls",
        "another server",
    ),
    Bad(
        "one server, two databases",
        external("redis://kv-0:6379/1", ["redis://kv-1:6379", "redis://kv-0:6379"]),
        "spec.kvStore.external.dataUrls",
        "write another server",
    ),
    Bad(
        "a data URL twice",
        external(data=[*DATA, DATA[0]]),
        "spec.kvStore.external.dataUrls",
        "write each once",
    ),
    Bad(
        "a login in a URL", external("redis://u:geheim@i"), "spec.kvStore.external.indexUrl", LOGIN
    ),
    Bad(
        "a password in a URL",
        external(data=["redis://:geheim@d"]),
        "spec.kvStore.external.dataUrls",
        LOGIN,
    ),
    Bad(
        "a CA without TLS",
        external(caSecretRef={"name": "ca"}),
        "spec.kvStore.external.caSecretRef",
        "write rediss://... URLs, or leave this out",
    ),
    Bad("an unknown hand-off", SIM | {"handoff": "maybe"}, "spec.handoff", '"always", "auto"'),
    Bad(
        "an unknown missing-role policy",
        SIM | {"missingRolePolicy": "wait"},
        "spec.missingRolePolicy",
        '"aggregate", "fail", "queue"',
    ),
    Bad(
        "policy queue without decode nodes",
        SIM | {"missingRolePolicy": "queue", "decode": {"replicas": 0}},
        "spec.missingRolePolicy",
        "write aggregate, or at least 1 in decode.replicas",
    ),
    Bad(
        "policy fail without prefill nodes",
        SIM | {"missingRolePolicy": "fail", "prefill": {"replicas": 0}},
        "spec.missingRolePolicy",
        "write aggregate, or at least 1 in decode.replicas and, without handoff: never, in prefill",
    ),
    Bad(
        "an IP block with a pod selector",
        clients({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}),
        "spec.networkPolicy.clients[0].ipBlock",
        "write two peers",
    ),
    Bad(
        "an IP block with a namespace selector",
        clients({"ipBlock": {"cidr": "10.0.0.0/8"}, "namespaceSelector": {}}),
        "spec.networkPolicy.clients[0].ipBlock",
        "write two peers",
    ),
    Bad(
        "a start timeout that is too short",
        engine(startTimeoutSeconds=9),
        "spec.engine.startTimeoutSeconds",
        "greater than or equal to 10",
    ),
    Bad(
        "an empty client peer",
        clients({}),
        "spec.networkPolicy.clients[0]",
        "write podSelector, namespaceSelector or ipBlock",
    ),
    Bad("a text for a boolean", SIM | {"paused": "yes"}, "spec.paused", "type boolean"),
    Bad("a pool name with a leading digit", SIM, "metadata.name", POOL_NAME, name="1st"),
    Bad("a pool name with a dot", SIM, "metadata.name", POOL_NAME, name="a.b"),
    Bad("a pool name of 41 characters", SIM, "metadata.name", POOL_NAME, name="a" * 41),
)
