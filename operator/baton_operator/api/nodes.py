"""The spec's `engine`, `prefill` and `decode`: what all nodes share, and the nodes of one role."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, field

from baton_operator.api.cel import CelRule
from baton_operator.api.fields import MOST_NODES, PodTemplate
from baton_operator.api.flags import NodeFlag
from baton_operator.api.record import Record
from baton_operator.api.resources import Resources
from baton_protocol.layout import StoreCodec
from baton_protocol.policies import (
    METHODS_WITH_FOLDER,
    DType,
    EngineKind,
    KVCacheDType,
    MatmulPrecision,
    Quantization,
    RunnerType,
    SpeculativeMethod,
)


class SpeculativeSpec(Record, frozen=True, kw_only=True, rename=None, omit_defaults=True):
    """--speculative-config, with vLLM's names of keys."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"!(self.method in {list(METHODS_WITH_FOLDER)}) || has(self.model)",
            f"is required for {', '.join(METHODS_WITH_FOLDER)}; write the folder of the weights",
            field=".model",
        ),
    )

    method: Annotated[
        SpeculativeMethod,
        Meta(
            description="What drafts are made of. ngram: what followed the last tokens where they"
            " last occurred. suffix: what followed the longest end of the text most often. grammar:"
            " the tokens that a grammar allows alone, which are drafts with the others, too."
            " draft_model: what a draft model of the same tokenizer generates. eagle, eagle3,"
            " medusa: what a head trained on the model's hidden states generates. mtp: what the"
            " checkpoint's own layer for it generates."
        ),
    ]
    num_speculative_tokens: (
        Annotated[int, Meta(ge=1, le=64, description="Most drafts per step. Default: 4.")] | None
    ) = None
    prompt_lookup_min: (
        Annotated[
            int, Meta(ge=1, le=64, description="Fewest tokens that match, for ngram. Default: 3.")
        ]
        | None
    ) = None
    prompt_lookup_max: (
        Annotated[
            int, Meta(ge=1, le=64, description="Most tokens that match, for ngram. Default: 5.")
        ]
        | None
    ) = None
    model: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=4096,
                description="For draft_model: the draft model's folder, or its GGUF file, in the"
                " nodes' containers. For eagle, eagle3 and medusa: the head's folder.",
            ),
        ]
        | None
    ) = None
    quantization: (
        Annotated[
            Quantization,
            Meta(
                description="For draft_model: round the draft model's weights while they are"
                " loaded: int8, fp8 or int4, or none. Default: none."
            ),
        ]
        | None
    ) = None


class EngineSpec(Record, frozen=True, kw_only=True):
    """Engine settings that all nodes share, so that their KV is interchangeable."""

    kind: Annotated[
        EngineKind, Meta(description="Kind of engine. torch: the real one. sim: a simulated one.")
    ] = "torch"
    dtype: Annotated[
        DType,
        Meta(
            description="Data type of computation and KV: bfloat16, float32, float16 (on GPUs), or"
            " auto, where each node decides. Nodes with different types exchange no KV."
        ),
    ] = "auto"
    matmul_precision: (
        Annotated[
            MatmulPrecision,
            Meta(
                description="How GPUs multiply float32 matrices: --matmul-precision highest, high"
                " or medium. Default: highest. Nodes with different values exchange no KV."
            ),
        ]
        | None
    ) = None
    quantization: (
        Annotated[
            Quantization,
            Meta(
                description="Round the weights of a plain checkpoint while they are loaded:"
                " --quantization int8, fp8 or int4, or none. Default: none. Nodes with different"
                " values exchange no KV."
            ),
        ]
        | None
    ) = None
    speculative_config: (
        Annotated[
            SpeculativeSpec,
            Meta(
                description="Compute drafts of the next tokens in the same step, and keep those"
                " that are right. Answers stay the same. Default: no drafts."
            ),
        ]
        | None
    ) = None
    kv_cache_dtype: (
        Annotated[
            KVCacheDType,
            Meta(
                description="How K and V are kept, --kv-cache-dtype. int8, fp8: in 8 bits."
                " bfloat16, float16, float32: whole; it must be the type of computation. auto: as"
                " the checkpoint says, or else whole. Default: auto. Nodes that keep KV differently"
                " exchange none."
            ),
        ]
        | None
    ) = None
    batch_invariant: (
        Annotated[
            bool,
            Meta(
                description="Compute a token's bits from the tokens before it alone, whatever the"
                " batch: --batch-invariant on (true) or off (false). Default: auto, on with cpu and"
                " off with cuda. Nodes with and without it exchange no KV."
            ),
        ]
        | None
    ) = None
    store_codec: (
        Annotated[
            StoreCodec,
            Meta(
                description="K and V in the store: in 8 bits (--store-codec int8), or as computed"
                " (none). Default: none. Nodes with different values exchange no KV."
            ),
        ]
        | None
    ) = None
    runner: (
        Annotated[
            RunnerType,
            Meta(
                description="What nodes give, --runner. generate: tokens. pooling: the vector of a"
                " text, or the scores of its classes. auto: as the model's folder says. Default:"
                " auto."
            ),
        ]
        | None
    ) = None
    block_size: Annotated[int, Meta(ge=1, description="Tokens per KV block.")] = 16
    chunk_blocks: (
        Annotated[int, Meta(ge=1, description="KV blocks per value in the store.")] | None
    ) = None
    max_model_len: (
        Annotated[int, Meta(ge=1, description="Maximum length of prompt plus answer, in tokens.")]
        | None
    ) = None
    start_timeout_seconds: (
        Annotated[
            int,
            Meta(
                ge=10,
                description="Seconds from a node's start to its first successful /ready, after"
                " which it is restarted. Default: 1800; with a memory limit and no GPU 120 +"
                " limit / 50 MiB, but at least 600.",
            ),
        ]
        | None
    ) = None
    extra_args: Annotated[
        tuple[NodeFlag, ...],
        Meta(
            max_length=64,
            description="More flags of `baton prefill` and `baton decode`, each as --NAME=VALUE.",
        ),
    ] = ()


class RoleSpec(Record, frozen=True, kw_only=True):
    """The nodes of one role."""

    replicas: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_NODES,
            description="Number of nodes of this role. With `autoscaling`, the initial number.",
        ),
    ] = 1
    resources: Annotated[
        Resources,
        Meta(
            description="Resources of the container `node`. With a GPU limit the node uses CUDA."
            " Default: requests of 1 CPU and 1Gi of memory, and ephemeral storage of 512Mi with a"
            " limit of 5Gi, in addition to model.storage."
        ),
    ] = Resources()
    pod_template: Annotated[
        PodTemplate,
        Meta(
            description="Merged over the operator's pod template. Lists whose items have a name"
            " are merged by name, volumeMounts by mountPath, tolerations by key. Everything else"
            " is replaced."
        ),
    ] = field(default_factory=dict)
