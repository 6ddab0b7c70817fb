"""Every option of an engine, declared once: type, default, help text and bounds. Imports no torch.

    EngineConfig   options of both engines: the device, sizes of the KV cache and of steps
    SimConfig      options of the simulated engine only: its geometry and timing
    TorchSettings  EngineConfig and a model folder

Other settings are derived from these fields: flags and environment variables of `baton` (see
`baton_cli.options`), the settings of a node (`baton_node.settings`), and the keyword arguments of
`LLM`. `runner.plan` decides options that are None.
"""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from baton_engine.config.quantization.kv_cache import CODES_OF
from baton_engine.config.scheduling_options import SchedulingOptions, SchedulingPolicy
from baton_engine.config.speculative import SpeculativeConfig
from baton_engine.errors import SettingsError
from baton_protocol.errors import exact
from baton_protocol.layout import StoreCodec
from baton_protocol.options import ByteSize, option, option_of
from baton_protocol.policies import (
    DType,
    KVCacheDType,
    MatmulPrecision,
    Quantization,
    RunnerType,
)
from baton_protocol.sampling import ALL_LOGPROBS, MAX_LOGPROBS

# The type of options that name a device.
Device = Annotated[str, "device"]
Kernels = Literal["auto", "torch", "triton"]
Overlap = Literal["auto", "on", "off"]
BatchInvariant = Literal["auto", "on", "off"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "baton", "transformers"]
PerformanceMode = Literal["balanced", "interactivity", "throughput"]
LogSteps = Literal["off", "text", "json"]
DEVICE_CHOICES = ("cpu", "cuda", "cuda:N")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of both engines. None means that the model and the machine decide."""

    # The heading in --help.
    TITLE: ClassVar[str] = "engine"

    dtype: DType = option(
        "auto",
        "auto: the checkpoint's, float32 for float16; of `baton up`: bfloat16 if the device"
        " computes in it and the checkpoint is not float32; float16: on cuda only",
    )
    matmul_precision: MatmulPrecision = option(
        "highest",
        "how cuda multiplies float32 matrices; high and medium are faster and less exact, and nodes"
        " with different values share no KV",
    )
    quantization: Quantization = option(
        "none",
        "round the weights of a plain checkpoint while they are loaded: int8 and fp8 with a scale"
        " per output, int4 with a scale and a minimum per 32 inputs; the head, routers and"
        " embeddings stay plain",
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        "int8, fp8: keep K and V in 8 bits, with a power of two per token and head; the name of the"
        " compute dtype: in that; auto: as the checkpoint's kv_cache_scheme says, or else in the"
        " compute dtype; nodes that keep KV differently share none",
    )
    device: Device = option("cpu", "device of the engine; cuda: the first GPU")
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory that may be in use, including that of other processes; KV gets"
        " what weights and the largest step leave",
        metavar="SHARE",
        least=0.01,
        most=1,
    )
    kv_memory: ByteSize | None = option(
        None,
        "memory of each engine's KV cache (default: see --gpu-memory-utilization; on cpu 1GiB or"
        " the free memory)",
        least=1,
    )
    kv_blocks: int | None = option(
        None,
        "size of the KV cache in blocks, instead of --kv-memory",
        least=1,
        excludes="kv_memory",
    )
    host_kv_memory: ByteSize = option(
        0,
        "host memory of each engine for KV blocks that its cache evicts; 0: none",
        least=0,
    )
    block_size: int = option(16, "tokens per KV block", least=1)
    chunk_blocks: int | None = option(
        None,
        "KV blocks moved as one chunk (default: the number whose value has 1 to 4 MiB and wastes"
        " least in Redis' allocator)",
        least=1,
    )
    kv_shards: int = option(
        1,
        "values per chunk, split by KV heads; must divide their number",
        least=1,
    )
    store_codec: StoreCodec = option(
        "none",
        "int8: the KV store has K and V in 8 bits, about half of bfloat16's bytes; each row is"
        " rounded when it is computed, so that KV from the store has the same bits as KV computed"
        " here",
    )
    overcommit: bool = option(
        False,
        "accept sizes, such as --kv-memory, that exceed the memory of this machine or container",
    )
    max_batched_tokens: int | None = option(
        None,
        "tokens computed in one step (default: on cpu 256, in bfloat16 512; on cuda 2048, on a card"
        " with 40 GB or more 8192; see --performance-mode)",
        least=1,
    )
    max_num_seqs: int | None = option(
        None, "sequences computed in one step (default: 256; see --performance-mode)", least=1
    )
    performance_mode: PerformanceMode = option(
        "balanced",
        "size of a step: the defaults of --max-batched-tokens and --max-num-seqs are doubled for"
        " throughput, and halved for interactivity",
    )
    scheduling_policy: SchedulingPolicy = option(
        "fcfs",
        "order of requests in an engine: as they come, or first those with the lowest `priority`;"
        " the last ones are preempted first",
    )
    long_prefill_token_threshold: int = option(
        0,
        "most tokens that a step computes of one prompt if there are other requests; 0: no limit",
        metavar="TOKENS",
        least=0,
    )
    max_num_partial_prefills: int | None = option(
        None,
        "most prompts of which a step computes a part only (default: no limit)",
        metavar="PROMPTS",
        least=1,
    )
    max_long_partial_prefills: int | None = option(
        None,
        "most prompts longer than --long-prefill-token-threshold in one step; shorter ones that"
        " wait behind them go first (default: no limit)",
        metavar="PROMPTS",
        least=1,
    )
    enable_chunked_prefill: bool = option(
        True,
        "compute a long prompt in several steps; without it, a prompt is computed in one, and"
        " --max-model-len is at most --max-batched-tokens",
    )
    enable_prefix_caching: bool = option(
        True,
        "use KV of earlier requests on the same node again; --fetch decides about KV in the store",
    )
    max_pinned_fraction: float = option(
        0.25,
        "share of the KV cache that pinned prefixes may keep; a request that needs more than the"
        " rest releases the oldest ones",
        metavar="SHARE",
        least=0,
        most=1,
    )
    scheduler_cls: str | None = option(
        None,
        "Python class that replaces the scheduler: a subclass of"
        " baton_engine.scheduling.scheduler.Scheduler",
        metavar="MODULE:CLASS",
    )
    max_model_len: int | None = option(
        None,
        "maximum tokens of prompt and answer (default: the model's, or what the KV cache holds)",
        least=1,
    )
    max_logprobs: int = option(
        MAX_LOGPROBS,
        "most likely tokens that a request may ask for at a position, by logprobs or"
        " prompt_logprobs; -1: the vocabulary. Each takes about 60 bytes of a message, and messages"
        " of 64 MB break a link",
        least=-1,
    )
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        "what a request's logprobs are: of the model's own logits (raw), or after penalties, bans,"
        " temperature and filters (processed); as log-probabilities or as logits. A prompt's and"
        " those of a beam search are always raw_logprobs",
    )
    threads: int | None = option(
        None, "CPU threads of each engine (default: the cores divided among the engines)", least=1
    )
    kernels: Kernels = option(
        "auto",
        "auto: triton on cuda, torch on cpu; triton on cpu is for tests, with TRITON_INTERPRET=1",
    )
    enforce_eager: bool = option(
        False, "record no CUDA graphs: faster start, less memory, slower steps"
    )
    overlap: Overlap = option(
        "auto", "launch a step before the previous one is read; auto: on with cuda, else off"
    )
    speculative_config: str | None = option(
        None,
        "compute drafts of the next tokens in the same step, and keep those that are right; answers"
        " stay the same. JSON with vLLM's keys: method (ngram, suffix, grammar, draft_model, eagle,"
        " eagle3, medusa, mtp), num_speculative_tokens, prompt_lookup_min, prompt_lookup_max,"
        " suffix_decoding_*, model, quantization (default: no drafts)",
        metavar="JSON",
    )
    batch_invariant: BatchInvariant = option(
        "auto",
        "compute a token's bits from the tokens before it alone, whatever the batch; auto: on with"
        " cpu, off with cuda, where its cost is not yet measured",
    )
    model_impl: ModelImpl = option(
        "auto",
        "whose code computes the model; auto: Baton's own for its model families, transformers' for"
        " all others",
    )
    runner: RunnerType = option(
        "auto",
        "what the engine gives: tokens (generate), or the vector of a text or the scores of its"
        " classes (pooling); auto: as the files of sentence-transformers and the architecture in"
        " the model's folder say",
    )
    log_steps: LogSteps = option(
        "off",
        "write a line to stderr for each step: its sequences, their tokens and why, which others"
        " wait and why, and its time; without a value: text",
        bare="text",
    )
    logits_processors: str | None = option(
        None,
        "logits processors of other packages, for requests whose vllm_xargs (in Python extra_args)"
        " they use: MODULE:CLASS, divided by commas; installed ones are found by themselves",
        metavar="NAMES",
    )
    verify_weights: bool = option(
        False, "hash the weights again at the start, even if .baton-digests.json has their digests"
    )

    def logprobs_of(self, vocab_size: int) -> int:
        """The limit of --max-logprobs for a model."""
        return vocab_size if self.max_logprobs == ALL_LOGPROBS else self.max_logprobs

    def engine_options(self) -> dict[str, Any]:
        """The EngineConfig fields of this record, as keyword arguments for another record."""
        return {
            option_field.name: getattr(self, option_field.name)
            for option_field in fields(EngineConfig)
        }

    def check(self) -> None:
        """Raise SettingsError, which names the option and the value."""
        check_choices(self)
        check_bounds(self, EngineConfig)
        if self.speculative_config is not None:
            SpeculativeConfig.parse(self.speculative_config)
        if not is_device(self.device):
            raise _unknown("device", self.device, DEVICE_CHOICES)
        SchedulingOptions.of(self).check()
        if self.kv_memory is not None and self.kv_blocks is not None:
            raise SettingsError(
                f"--kv-memory {self.kv_memory} and --kv-blocks {self.kv_blocks} exclude each other"
            )
        if self.kv_cache_dtype in CODES_OF and self.store_codec != "none":
            raise SettingsError(
                f"--store-codec {self.store_codec} is for KV in the compute dtype: with"
                f" --kv-cache-dtype {self.kv_cache_dtype} the store has 8 bits as it is; leave out"
                " one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """Geometry and timing of the simulated engine, which reads no model folder for them.

    A step with prompt tokens takes prefill_base_ms + prompt tokens x prefill_ms_per_token. A step
    with generating sequences takes decode_ms + generating sequences x decode_ms_per_seq. A step
    with both takes the sum. See `sim.runner.Timing`.
    """

    TITLE: ClassVar[str] = "simulated engine (--engine sim); milliseconds"

    prefill_base_ms: float = option(0.0, "time of a step with prompt tokens", least=0)
    prefill_ms_per_token: float = option(0.0, "additional time per prompt token", least=0)
    decode_ms: float = option(0.0, "time of a step with generating sequences", least=0)
    decode_ms_per_seq: float = option(0.0, "additional time per generating sequence", least=0)
    layers: int = option(2, "number of layers with KV", least=1)
    kv_heads: int = option(2, "number of KV heads", least=1)
    head_dim: int = option(16, "values per KV head", least=1)
    vocab_size: int = option(0, "number of token ids (default: those of a byte tokenizer)", least=0)
    classes: int = option(
        0, "a pooling model with scores of this number of classes (default: none)", least=0
    )
    eos_every: int = option(0, "end an answer at every Nth position (default: never)", least=0)
    # For failover tests. Must not be an id that the simulated model generates.
    poison_token: int | None = option(
        None, "a prompt with this token id ends the engine process (default: none)", least=0
    )

    def sim_options(self) -> dict[str, Any]:
        """The SimConfig fields of this record, as keyword arguments for another record."""
        return {
            option_field.name: getattr(self, option_field.name)
            for option_field in fields(SimConfig)
        }


@dataclass(frozen=True, kw_only=True)
class TorchSettings(EngineConfig):
    """Settings of a torch engine for one model folder."""

    model: Path
    name: str = ""  # as reported in EngineInfo; "" is the folder's last component
    load_format: LoadFormat = "auto"  # "dummy": random weights, from config.json alone

    @classmethod
    def of(cls, config: EngineConfig, model: Path, **more: Any) -> Self:
        """Settings with the engine options of `config` (which may be a subclass with more fields),
        the model folder and the fields in `more`."""
        return cls(model=model, **config.engine_options(), **more)

    def check(self) -> None:
        EngineConfig.check(self)
        check_dtype(self)


def check_dtype(config: EngineConfig) -> None:
    """Raise SettingsError if the device does not compute in this dtype, or with this precision."""
    cuda = on_cuda(config.device)
    if config.dtype == "float16":
        if not cuda and config.kernels != "triton":  # in triton's interpreter, for tests
            raise SettingsError(
                f"--dtype float16 is computed on cuda only, and --device is {config.device}: use"
                " float32, which has all numbers of float16, or bfloat16"
            )
        for flag, value in (
            ("--kv-cache-dtype", config.kv_cache_dtype),
            ("--store-codec", config.store_codec),
        ):
            if value not in ("auto", "none"):
                raise SettingsError(
                    f"{flag} {value} needs --dtype bfloat16 or float32: float16 has too few"
                    " exponents for a power of two per row"
                )
    if config.matmul_precision != "highest" and not cuda:
        raise SettingsError(
            f"--matmul-precision {config.matmul_precision} is for cuda, and --device is"
            f" {config.device}: a CPU would round float32 to bfloat16; use --dtype bfloat16"
        )


def on_cuda(device: str) -> bool:
    """Whether a valid device name is a GPU's."""
    return device != "cpu"


def is_device(name: str) -> bool:
    """Whether `name` is cpu, cuda (the first GPU) or cuda:N. Does not check that the device
    exists."""
    return _DEVICE.fullmatch(name) is not None


def check_bounds(settings: object, declared_by: type, prefix: str = "--") -> None:
    """Raise SettingsError for a number in `settings` outside the bounds that the option record
    `declared_by` gives for a field of that name. `prefix` is the beginning of the flag names."""
    for option_field in fields(declared_by):
        value, declared = getattr(settings, option_field.name, None), option_of(option_field)
        if value is None or declared is None:
            continue
        least, most = declared.least, declared.most
        flag = prefix + option_field.name.replace("_", "-")
        # "not >=" rather than "<", so that NaN is out of bounds.
        if least is not None and not value >= least:
            raise SettingsError(f"{flag} is {value}; it must be at least {exact(least)}")
        if most is not None and not value <= most:
            raise SettingsError(f"{flag} is {value}; it must be at most {exact(most)}")


def check_choices(settings: object) -> None:
    """Raise SettingsError for a field whose value is not in its Literal type."""
    for name, hint in typing.get_type_hints(type(settings)).items():
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        if choices and getattr(settings, name) not in choices:
            raise _unknown(name, getattr(settings, name), choices)


def _unknown(name: str, value: object, choices: tuple[str, ...]) -> SettingsError:
    option = "--" + name.replace("_", "-")
    return SettingsError(f"{option} {value} is unknown; use {', '.join(choices)}")
