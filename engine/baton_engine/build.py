"""Build a torch engine: settings and a model folder in, an EngineCore out.

User errors are found before the weights are read, and reported in one line (see `runner.plan`).
Then the weights are loaded. On CUDA, the memory of the largest step is measured, the KV pool gets
what is left, and decode steps of all sizes are recorded.

The engine gives its memory back while it sleeps (TorchResources), and is built again on it.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, cast

import torch

from baton_engine.attention.interface import AttentionBackend
from baton_engine.attention.selector import Kernels, attention_for
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.request_processors import load_processors
from baton_engine.config.scheduling_options import SchedulingOptions
from baton_engine.core.engine_core import EngineCore
from baton_engine.core.sleep import EngineParts
from baton_engine.core.step_log import StepLog
from baton_engine.errors import EngineError, OutOfMemory, SettingsError
from baton_engine.interface import EngineInfo, SleepLevel
from baton_engine.kv.host_blocks import CopiedBlocks, HostMemory
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_engine.kv.pinned_blocks import PinnedBlocks
from baton_engine.layers.linear_method import MethodOf, packed_methods
from baton_engine.layers.ops import TORCH_OPS, Ops
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.host_memory import free_memory
from baton_engine.memory.malloc import keep_freed_memory, return_freed_memory
from baton_engine.memory.requirements import layout_of
from baton_engine.models.model import Model
from baton_engine.models.registry import build_model
from baton_engine.progress import ProgressLine
from baton_engine.runner.build_head import LoadedHead, head_proposer, load_planned
from baton_engine.runner.cuda_card import CudaCard
from baton_engine.runner.encoded_memory import EncodedMemory
from baton_engine.runner.encoder_runner import EncoderRunner
from baton_engine.runner.forward import forward_steps
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.runner.moved_tensors import MovedTensors
from baton_engine.runner.plan import EnginePlan, make_plan, plan_head
from baton_engine.runner.profile_run import PROFILE_BLOCKS, profile
from baton_engine.runner.state_check import blocks_needed, check_state
from baton_engine.runner.warm_up import counting, describe, warm_all
from baton_engine.speculation.build import make_drafter
from baton_engine.speculation.draft_kv import DraftKV
from baton_engine.speculation.draft_model import DraftLimits, DraftModel
from baton_engine.speculation.proposer import Proposer
from baton_engine.weights.checkpoint import weight_files
from baton_engine.weights.digest import check_unchanged, file_states, tensor_digests
from baton_engine.weights.dummy import dummy_digests, fill_slots
from baton_engine.weights.loader import load_weights
from baton_engine.weights.new_version import write_version
from baton_protocol.fingerprint import TensorDigest, fingerprint
from baton_protocol.layout import CODES

if TYPE_CHECKING:
    from baton_engine.models.bridge.encoders.model import EncoderModel

# On a CPU, torch and oneDNN each cache compiled products, one per shape and 1,024 by default. Each
# takes 0.4 MB that our memory estimate does not include. Prompts of all lengths took a small engine
# from 640 to 1,081 MB; with 256 entries in both caches it stays below 700 MB. Both variables are
# read at the first product.
PRODUCT_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
PRODUCTS_KEPT = "256"

logger = logging.getLogger(__name__)


def build_torch(
    settings: TorchSettings, *, free: Callable[[], int | None] = free_memory
) -> EngineCore:
    """Build the engine. Raises SettingsError or ModelError, with a one-line message, for errors
    that a user can correct. `free` returns this machine's free memory in bytes, or None if it is
    unknown."""
    started = time.monotonic()
    plan = _plan(settings, free)
    processors = load_processors(settings.logits_processors, plan.config.vocab_size)
    with _no_memory_left(plan):
        loaded = _load(settings, plan)
        plan = _profiled(plan, loaded)
        resources = TorchResources(settings, plan, loaded)
        parts = resources.start()
    memory, plan = resources.memory, resources.plan
    engine = EngineCore(
        *(parts.info, parts.runner, parts.host),
        stored=memory if plan.layout.codec == "none" else EncodedMemory(memory),
        overlap=plan.overlap,
        scheduling=SchedulingOptions.of(settings),
        drafter=parts.drafter,
        step_log=StepLog.of(settings.log_steps),
        processors=processors,
        resources=resources,
    )
    _log_ready(parts.info, plan, resources.buckets, time.monotonic() - started)
    return engine


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An engine's weights, the models that use them, and the digests of the target's."""

    model: Model | EncoderModel
    draft_model: Model | None
    head: LoadedHead | None
    digests: Sequence[TensorDigest]

    @property
    def decoder(self) -> Model:
        """Not for an encoder."""
        return cast("Model", self.model)

    @property
    def encoder(self) -> EncoderModel:
        return cast("EncoderModel", self.model)


def _load(settings: TorchSettings, plan: EnginePlan) -> _Loaded:
    weights_there = settings.load_format != "dummy"
    states = file_states(settings.model) if weights_there else {}
    digests = _digests(settings, plan)
    model = _load_encoder(settings, plan) if plan.config.encodes else _load_model(settings, plan)
    if weights_there:
        check_unchanged(settings.model, states)
    if plan.config.encodes:
        return _Loaded(model, None, None, digests)
    head = _load_head(plan, cast("Model", model))
    return _Loaded(model, _load_draft_model(plan), head, digests)


class TorchResources:
    """The memory of a torch engine, and how its parts are built on it.

    Weights live in closures of layers, so they are never replaced where they are: the models are
    dropped and loaded again. The pool stays (see TorchMemory.free); all else is built again by
    start(), which on CUDA records the decode steps again, since the addresses have changed.
    """

    def __init__(self, settings: TorchSettings, plan: EnginePlan, loaded: _Loaded) -> None:
        self.plan = plan
        self.memory = TorchMemory(plan.layout, plan.num_blocks, plan.device)
        self.buckets: Sequence[int] = ()
        self._settings = settings
        self._loaded: _Loaded | None = loaded
        self._moved: MovedTensors | None = None  # the weights, if they are in host memory
        self._kv_there = True
        # Removes the folder of weights that were given as tensors, at the latest with this object.
        self._remove_written: Callable[[], object] = nothing

    def free_kv(self) -> None:
        self.memory.free()
        self._kv_there = False
        self._return_memory()

    def restore_kv(self) -> None:
        if not self._kv_there:
            self.memory.restore()
            self._kv_there = True

    def free_weights(self, level: SleepLevel) -> None:
        if level == 2:
            self._loaded = self._moved = None
        elif self._loaded is not None and self._moved is None and self.plan.device.type != "cpu":
            self._moved = MovedTensors.of(self._loaded)
        self._return_memory()

    def restore_weights(self) -> None:
        if self._moved is not None:
            self._moved.move_back()
            self._moved = None
        if self._loaded is None:
            self._load(self._settings, self._version(self._settings))

    def replace_weights(self, weights: Path | Mapping[str, torch.Tensor]) -> None:
        remove = self._remove_written
        if isinstance(weights, Path):
            self._replace_weights(weights)
            self._remove_written = nothing
        else:
            written = Path(mkdtemp(prefix="baton-weights-"))
            finalizer = weakref.finalize(self, shutil.rmtree, written, ignore_errors=True)
            try:
                write_version(self._settings.model, weights, written)
                self._replace_weights(written)
            except BaseException:
                finalizer()
                raise
            self._remove_written = finalizer
        remove()

    def _replace_weights(self, model: Path) -> None:
        name = self._settings.name or self._settings.model.resolve().name
        settings = replace(self._settings, model=model, name=name)
        plan = self._version(settings)
        if settings.load_format != "dummy":
            _digests(settings, plan)  # finds broken files before the old weights are dropped
        were_there, old = self._loaded is not None, (self._settings, self.plan)
        self.free_weights(2)
        try:
            self._load(settings, plan)
        except (EngineError, OSError):
            if were_there:
                self._load(*old)
            raise

    def _version(self, settings: TorchSettings) -> EnginePlan:
        """The plan for the weights that are in the folder now. Raises SettingsError unless they are
        of the same model: the pool and all sizes stay."""
        config = read_config(
            *(settings.model, settings.model_impl, settings.quantization, settings.runner)
        )
        config = config.limited_to(settings.max_model_len)
        head = plan_head(settings, config)
        was = self.plan
        answers = config.pooling, config.classes, config.pooled
        asked = layout_of(settings, config), config.canonical(), config.quantization, answers
        had = was.config.canonical(), was.config.quantization
        answered = was.config.pooling, was.config.classes, was.config.pooled
        if asked != (was.layout, *had, answered):
            raise SettingsError(
                f"{settings.model} is no version of the model that runs: its config asks for other"
                " layers, sizes or formats; start an engine with it instead"
            )
        return replace(was, config=config, head=head)

    def _load(self, settings: TorchSettings, plan: EnginePlan) -> None:
        started = time.monotonic()
        with _no_memory_left(plan):
            self._loaded = _load(settings, plan)
        self._settings, self.plan = settings, plan
        logger.info("loaded %s again in %.1f s", settings.model, time.monotonic() - started)

    def _return_memory(self) -> None:
        """What nobody uses goes back to the kernel, or to the device."""
        gc.collect()  # models have cycles
        if self.plan.device.type == "cpu":
            return_freed_memory()
        else:
            torch.cuda.empty_cache()

    def start(self) -> EngineParts:
        assert self._loaded is not None, "the weights are away"
        loaded, plan = self._loaded, self.plan
        if plan.config.encodes:
            info = _info(self._settings, plan, loaded)
            return EngineParts(info, EncoderRunner(loaded.encoder, self.memory), None, None)
        with _no_memory_left(plan):
            runner = _runner(plan, loaded.decoder, self.memory)
            runner.logprobs_mode = self._settings.logprobs_mode
            if plan.exact and not runner.exact:
                self.plan = plan = _not_exact(plan, self._settings)
            drafting: Proposer | None = _draft_model(plan, loaded.draft_model)
            if loaded.head is not None:
                drafting = head_proposer(plan, loaded.head, runner, loaded.decoder.ops)
            with ProgressLine(sys.stderr) as line:
                warm_all(runner.buckets, runner.warm, runner.warm_eager, line)
        self.buckets = runner.buckets
        drafter = make_drafter(
            *(self._settings.speculative_config, plan.config.vocab_size, drafting),
            overlap=plan.overlap,
        )
        info = _info(self._settings, plan, loaded)
        return EngineParts(info, runner, _host_memory(self.memory, plan), drafter)


def nothing() -> None:
    """There is nothing to remove."""


def _info(settings: TorchSettings, plan: EnginePlan, loaded: _Loaded) -> EngineInfo:
    quantized = plan.config.quantization
    return EngineInfo(
        kind="torch",
        model=settings.name or settings.model.resolve().name,
        fingerprint=fingerprint(
            list(loaded.digests), plan.layout, _canonical(settings, plan, loaded.model)
        ),
        layout=plan.layout,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_batched_tokens=plan.demand.max_batched_tokens,
        max_num_seqs=plan.demand.max_num_seqs,
        vocab_size=plan.config.vocab_size,
        eos_ids=plan.config.eos_ids,
        exact="bitwise" if plan.exact else "numeric",
        weights=quantized.method if quantized is not None else plan.demand.dtype,
        max_logprobs=settings.logprobs_of(plan.config.vocab_size),
        pooling=plan.config.pooling,
        vector_size=plan.config.vector_size,
        whole_prompts=plan.config.encodes,
    )


def _not_exact(plan: EnginePlan, settings: TorchSettings) -> EnginePlan:
    """The plan of an engine whose products turned out to depend on the batch. Raises SettingsError
    if the user asked for others."""
    why = f"products in {plan.demand.dtype} on this CPU depend on the place of a row"
    if settings.batch_invariant == "on":
        raise SettingsError(f"--batch-invariant on: {why}; use --batch-invariant off")
    logger.warning("--batch-invariant auto: off, because %s", why)
    return replace(plan, exact=False)


def build_runner(settings: TorchSettings) -> TorchRunner:
    """Build only the runner, for tests and benchmarks of single steps."""
    plan = _plan(settings, free_memory)
    memory = TorchMemory(plan.layout, plan.num_blocks, plan.device)
    return _runner(plan, _load_model(settings, plan), memory)


def _plan(settings: TorchSettings, free: Callable[[], int | None]) -> EnginePlan:
    """--max-model-len as given, not the length that fits the pool, chooses the factors of a
    longrope model: engines with the same flags then have the same fingerprint."""
    plan = make_plan(settings, free=free)
    return replace(plan, config=plan.config.limited_to(settings.max_model_len))


def _canonical(settings: TorchSettings, plan: EnginePlan, model: Model | EncoderModel) -> str:
    """The config's part of the fingerprint. Nodes with --batch-invariant exchange KV only with
    nodes that compute the same bits: KV of other arithmetic would change theirs."""
    canonical = plan.config.canonical()
    if plan.layout.dtype in CODES:  # else the layout has the dtype
        canonical = f"{canonical} computed in {plan.demand.dtype}"
    if settings.matmul_precision != "highest":
        canonical = f"{canonical} matmul {settings.matmul_precision}"
    if plan.config.pooling:  # no node of a pool takes over another kind of request
        canonical = f"{canonical} {plan.config.pooling}"
    if plan.config.encodes:
        canonical = f"{canonical} {plan.config.pooled}"
    if not plan.exact:
        return canonical
    return f"{canonical} batch-invariant {_device_kind(plan)} {plan.kernels} {model.bits}"


def _device_kind(plan: EnginePlan) -> str:
    """Devices of a kind multiply with the same instructions: a CPU's instruction set, or a GPU's
    compute capability."""
    if plan.device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    major, minor = torch.cuda.get_device_capability(plan.device)
    return f"cuda {major}.{minor}"


def _digests(settings: TorchSettings, plan: EnginePlan) -> list[TensorDigest]:
    if settings.load_format == "dummy":
        return dummy_digests(plan.config, plan.device.type)
    return tensor_digests(
        settings.model, plan.config, threads=plan.threads, verify=settings.verify_weights
    )


def _prepare_torch(settings: TorchSettings, plan: EnginePlan) -> None:
    torch.set_num_threads(plan.threads)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    for cache in PRODUCT_CACHES:
        os.environ.setdefault(cache, PRODUCTS_KEPT)
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)  # kernels are launched on the current one
    else:
        keep_freed_memory()


def _load_encoder(settings: TorchSettings, plan: EnginePlan) -> EncoderModel:
    # Imported here, because transformers may be missing.
    from baton_engine.models.bridge.encoders.model import load_encoder

    _prepare_torch(settings, plan)
    slots = _slots(plan, plan.config, exact=plan.exact)
    return load_encoder(
        plan.config, slots, None if settings.load_format == "dummy" else settings.model
    )


def _load_model(settings: TorchSettings, plan: EnginePlan) -> Model:
    _prepare_torch(settings, plan)
    slots = _slots(plan, plan.config, exact=plan.exact)
    if plan.config.bridge is not None:
        return _load_bridged(settings, plan, slots)
    model = build_model(plan.config, slots)
    if settings.load_format == "dummy":
        fill_slots(slots)
    else:
        total = sum(path.stat().st_size for path in weight_files(settings.model))
        with ProgressLine(sys.stderr) as line:
            load_weights(settings.model, plan.config, slots, counting(line, total))
    slots.finish()
    return model


def _slots(plan: EnginePlan, config: ModelConfig, *, exact: bool) -> WeightSlots:
    return WeightSlots(
        *(TORCH_DTYPES[plan.demand.dtype], plan.device, ops_for(plan.kernels)),
        method_of=linear_methods(plan.kernels, exact=exact),
        exact_rows=plan.demand.max_batched_tokens if exact else None,
        quantization=config.quantization,
    )


def _load_head(plan: EnginePlan, model: Model) -> LoadedHead | None:
    """The head that drafts tokens, if there is one. Its bits change no answer, so they may depend
    on the batch."""
    if plan.head is None:
        return None
    return load_planned(plan.head, _slots(plan, plan.head.config.layer, exact=False), model)


def _load_bridged(settings: TorchSettings, plan: EnginePlan, slots: WeightSlots) -> Model:
    # Imported here, because transformers may be missing.
    from baton_engine.models.bridge.model import load_bridged

    logger.info(
        "%s is computed by transformers' code, which is slower than a family of Baton's own",
        plan.config.architecture,
    )
    folder = None if settings.load_format == "dummy" else settings.model
    model = load_bridged(plan.config, slots, folder)
    # Rounded KV would hide what the check looks for.
    layout = layout_of(replace(settings, kv_cache_dtype="auto", store_codec="none"), plan.config)
    memory = TorchMemory(layout, blocks_needed(layout), plan.device)
    runner = TorchRunner(model, memory, _attention(plan, memory))
    check_state(runner, layout, plan.config, model.expected)
    return model


def _load_draft_model(plan: EnginePlan) -> Model | None:
    """The model that drafts, if one does."""
    if plan.draft_model is None or plan.of_draft_model is None:
        return None
    logger.info("drafts come from %s", plan.draft_model.settings.model)
    return _load_model(plan.draft_model.settings, plan.of_draft_model)


def _draft_model(plan: EnginePlan, model: Model | None) -> DraftModel | None:
    own = plan.of_draft_model
    if model is None or own is None:
        return None
    runner = _runner(own, model, TorchMemory(own.layout, own.num_blocks, own.device))
    with ProgressLine(sys.stderr) as line:
        warm_all(runner.buckets, runner.warm, runner.warm_eager, line)
    limits = DraftLimits(
        max_batched_tokens=own.demand.max_batched_tokens,
        max_model_len=own.max_model_len,
        vocab_size=own.config.vocab_size,
    )
    return DraftModel(runner, DraftKV(own.num_blocks, own.layout), limits)


def _profiled(plan: EnginePlan, loaded: _Loaded) -> EnginePlan:
    """The plan after the largest step has run, on CUDA."""
    if plan.device.type != "cuda":
        return plan
    if plan.config.encodes:
        memory = TorchMemory(plan.layout, PROFILE_BLOCKS, plan.device)
        return profile(plan, EncoderRunner(loaded.encoder, memory), CudaCard(plan.device))
    runner = _profile_runner(plan, loaded.decoder)
    own, second = plan.of_draft_model, loaded.draft_model
    other = None if own is None or second is None else _profile_runner(own, second)
    return profile(plan, runner, CudaCard(plan.device), other)


def _profile_runner(plan: EnginePlan, model: Model) -> TorchRunner:
    memory = TorchMemory(plan.layout, PROFILE_BLOCKS, plan.device)
    return TorchRunner(model, memory, _attention(plan, memory))


def _runner(plan: EnginePlan, model: Model, memory: TorchMemory) -> TorchRunner:
    attention = _attention(plan, memory)
    forward = forward_steps(
        *(model, memory, attention),
        max_num_seqs=plan.demand.max_num_seqs,
        max_model_len=plan.max_model_len,
        enforce_eager=not plan.demand.graphs,
    )
    return TorchRunner(model, memory, attention, forward)


def _attention(plan: EnginePlan, memory: TorchMemory) -> AttentionBackend:
    dtype = TORCH_DTYPES[plan.demand.dtype]
    return attention_for(plan.kernels, memory, plan.config, exact=plan.exact, dtype=dtype)


def _host_memory(memory: TorchMemory, plan: EnginePlan) -> HostMemory | None:
    if not plan.host_slots:
        return None
    room = PinnedBlocks if plan.device.type == "cuda" else CopiedBlocks
    return room(memory, plan.host_slots)


@contextmanager
def _no_memory_left(plan: EnginePlan) -> Iterator[None]:
    """Turn out-of-memory into a SettingsError: other processes may take memory after the check."""
    try:
        yield
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        raise SettingsError(
            f"{plan.device} ran out of memory while the model was loaded: others took some since "
            "the start, or a step needs more than was reckoned; lower "
            f"--max-batched-tokens {plan.demand.max_batched_tokens}, "
            f"--max-num-seqs {plan.demand.max_num_seqs} or --gpu-memory-utilization"
        ) from error


def _log_ready(info: EngineInfo, plan: EnginePlan, buckets: Sequence[int], seconds: float) -> None:
    logger.info(
        "%s (%s, %s, %s) is ready after %.1f s; %d KV blocks of %d tokens, sequences of up to %d; "
        "%s; overlap %s, %s, exact: %s",
        *(info.model, plan.config.architecture, plan.demand.dtype, plan.device, seconds),
        *(info.num_blocks, info.layout.block_size, info.max_model_len, plan.pool_text()),
        "on" if plan.overlap else "off",
        f"graphs of {describe(buckets)}" if buckets else "no graphs",
        info.exact,
    )


def ops_for(kernels: Kernels) -> Ops:
    if kernels == "torch":
        return TORCH_OPS
    # Imported here, because torch wheels for CPUs do not include triton.
    from baton_engine.layers.triton_ops import TritonOps

    return TritonOps()


def linear_methods(kernels: Kernels, *, exact: bool) -> MethodOf:
    """With Triton's kernels, quantized weights take the same one in any case: no library multiplies
    them."""
    if kernels == "torch":
        return packed_methods
    from baton_engine.layers.triton_matmul import fixed_tile_methods, quantized_tile_methods

    return fixed_tile_methods if exact else quantized_tile_methods
