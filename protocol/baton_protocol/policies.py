"""The policies that flags, records and the InferencePool name alike.

In: nothing. Out: a Literal type per policy. The first value is the default, where there is one. The
command line, the router, nodes, the store and the operator import them, so a new value is written
once.
"""

from __future__ import annotations

from typing import Literal, get_args

# Who computes the prompt of a decode node's request (see placement.policy of the router).
Handoff = Literal["auto", "always", "never"]
# What happens to a request whose role has no ready node: the other role runs it, it waits, or it is
# refused.
MissingRole = Literal["aggregate", "queue", "fail"]
# How the router ranks nodes.
Ranking = Literal["cost", "random", "round-robin", "least-request", "prefix"]
RANKINGS: tuple[Ranking, ...] = get_args(Ranking)
# Whether a decode node fetches stored chunks; auto: those that it predicts to be faster.
FetchPolicy = Literal["auto", "always", "never"]
# Whether a node sets the options of its Redis servers, or only verifies them.
StoreCare = Literal["apply", "check"]
# Which engine a node has; sim is the simulated one.
EngineKind = Literal["torch", "sim"]
# What an engine computes in; auto: the checkpoint's dtype, or what the device is fast in.
DType = Literal["auto", "float32", "bfloat16", "float16"]
# How a GPU multiplies float32 matrices, by torch's names.
MatmulPrecision = Literal["highest", "high", "medium"]
# How weights of a plain checkpoint are rounded while they are loaded.
Quantization = Literal["none", "fp8", "int8", "int4"]
# What an engine gives: tokens, or vectors. auto: as the model's folder says.
RunnerType = Literal["auto", "generate", "pooling"]
# What K and V are kept in; auto: what the checkpoint is made for, which is the compute dtype for
# most. Others than int8 and fp8 are the compute dtype by its name.
KVCacheDType = Literal["auto", "int8", "fp8", "bfloat16", "float16", "float32"]
# What drafts of next tokens are made of. There is no default: without a method there are no drafts.
SpeculativeMethod = Literal[
    "ngram", "suffix", "grammar", "draft_model", "eagle", "eagle3", "medusa", "mtp"
]
# The methods that need the folder of a model or a head.
METHODS_WITH_FOLDER: tuple[SpeculativeMethod, ...] = ("draft_model", "eagle", "eagle3", "medusa")
# Who may use the KV of a tenant's prompts.
Sharing = Literal["pool", "tenant"]
