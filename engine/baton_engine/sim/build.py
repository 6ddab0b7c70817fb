"""Build the simulated engine: all of the real engine except the model. Imports no torch.

In: SimSettings. Out: an EngineCore with real blocks, hashes and KV bytes, whose steps take the time
that the settings give. Router, scaling and roll-out tests use it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from baton_engine.config.batch_limits import DEFAULT_SEQS, batch_limits
from baton_engine.config.engine_config import EngineConfig, LogSteps, SimConfig, check_bounds
from baton_engine.config.scheduling_options import DEFAULT_SCHEDULING, SchedulingOptions
from baton_engine.core.engine_core import EngineCore
from baton_engine.core.sleep import EngineParts
from baton_engine.core.step_log import StepLog
from baton_engine.errors import SettingsError
from baton_engine.interface import EngineInfo, SleepLevel
from baton_engine.kv.host_blocks import CopiedBlocks, slots_for
from baton_engine.memory.host_memory import check_asked, free_memory
from baton_engine.sim.memory import WORD_BYTES, SimMemory
from baton_engine.sim.model import VECTOR_SIZE, Vocabulary
from baton_engine.sim.runner import SimRunner
from baton_engine.sim.timing import Timing
from baton_engine.speculation.build import make_drafter
from baton_protocol.fingerprint import TensorDigest, fingerprint
from baton_protocol.ids import Fingerprint
from baton_protocol.layout import ITEM_BYTES, KVGroup, KVLayout, default_chunk_blocks
from baton_protocol.policies import RunnerType
from baton_protocol.pooling import Pooling
from baton_protocol.sampling import ALL_LOGPROBS, MAX_LOGPROBS

# Part of the fingerprint. Change it whenever the same tokens get different KV bytes.
FORMULA = "sim/1"
# The built-in byte tokenizer's.
BYTE_VOCAB_SIZE = 259
BYTE_EOS_IDS = (257,)
# Options for which None means the default below.
OPEN_SIZES = ("chunk_blocks", "max_model_len")
DEFAULT_BATCHED_TOKENS = 256
# Settings that cannot change KV. All others are part of the fingerprint.
NO_KV_SETTINGS = frozenset(
    {
        "model",  # a name for clients
        # Part of the KV layout, which the fingerprint includes; chunk_blocks is never None there.
        *("layers", "kv_heads", "head_dim", "block_size", "dtype", "chunk_blocks", "kv_shards"),
        "groups",
        *("eos_ids", "first_id", "end_id", "eos_every"),  # change sampled ids, not KV
        "poison_token",  # ends the process before any KV is written
        # Sizes, schedules and timing
        *("num_blocks", "host_kv_memory", "max_model_len", "max_batched_tokens", "max_num_seqs"),
        *("overcommit", "overlap", "speculative_config", "scheduling", "log_steps"),
        *("prefill_base_ms", "prefill_ms_per_token", "decode_ms", "decode_ms_per_seq"),
    }
)
# Settings that are in the fingerprint as what they make of the engine (see SimSettings.pooling).
POOLING_SETTINGS = frozenset({"runner", "classes"})


@dataclass(frozen=True, kw_only=True)
class SimSettings(SimConfig):
    """All settings of a simulated engine.

    The defaults are a small geometry (512 bytes of KV per token), no delays, and the vocabulary of
    the built-in byte tokenizer: ids 0..255 are bytes, followed by BOS, EOS and PAD.
    """

    model: str = "sim"
    # The rest of the geometry. head_dim times the dtype's size must be a multiple of 8.
    block_size: int = 16  # tokens
    dtype: str = "float32"
    chunk_blocks: int | None = None  # None: see layout.default_chunk_blocks
    kv_shards: int = 1  # stored values per chunk, each with a part of the KV heads
    groups: tuple[KVGroup, ...] = ()  # of the layers (see KVLayout)
    vocab_size: int = BYTE_VOCAB_SIZE
    eos_ids: tuple[int, ...] = BYTE_EOS_IDS
    # The model generates ids in [first_id, end_id); the default is printable ASCII.
    first_id: int = 32
    end_id: int = 127
    # Sizes
    num_blocks: int = 2048  # KV blocks, without the padding block
    host_kv_memory: int = 0  # bytes of the host tier; 0: none
    max_model_len: int = 8192  # tokens; never more than the pool holds
    max_batched_tokens: int = DEFAULT_BATCHED_TOKENS  # per step
    max_num_seqs: int = DEFAULT_SEQS
    max_logprobs: int = MAX_LOGPROBS
    overcommit: bool = False  # skip the check that the sizes fit this machine's memory
    overlap: bool = False  # launch a step before the previous one is read
    speculative_config: str | None = None  # see EngineConfig
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING
    log_steps: LogSteps = "off"  # see EngineConfig
    runner: RunnerType = "auto"  # see EngineConfig

    @property
    def pooling(self) -> Pooling:
        """What it answers with instead of tokens; `auto` is what `classes` says."""
        if self.runner == "generate" or not (self.classes or self.runner == "pooling"):
            return ""
        return "classify" if self.classes else "embed"

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        sim: SimConfig,
        *,
        model: str,
        vocab_size: int = BYTE_VOCAB_SIZE,
        eos_ids: tuple[int, ...] = BYTE_EOS_IDS,
    ) -> Self:
        """Settings from `config` and `sim`, with defaults for options that are None. `vocab_size`
        and `eos_ids` are the tokenizer's. Raises SettingsError."""
        SchedulingOptions.of(config).check()
        limits = batch_limits(config, DEFAULT_BATCHED_TOKENS)
        asked = config.engine_options()
        sizes = {name: asked[name] for name in OPEN_SIZES if asked[name] is not None}
        if limits.longest is not None:
            sizes.setdefault("max_model_len", limits.longest)
        settings = cls(
            model=model,
            **(sim.sim_options() | {"vocab_size": sim.vocab_size or vocab_size}),
            eos_ids=eos_ids,
            block_size=config.block_size,
            kv_shards=config.kv_shards,
            dtype="float32" if config.dtype == "auto" else config.dtype,
            host_kv_memory=config.host_kv_memory,
            max_batched_tokens=limits.tokens,
            max_num_seqs=limits.seqs,
            max_logprobs=config.max_logprobs,
            overcommit=config.overcommit,
            overlap=config.overlap == "on",
            speculative_config=config.speculative_config,
            scheduling=SchedulingOptions.of(config),
            log_steps=config.log_steps,
            runner=config.runner,
            **sizes,
        )
        if config.kv_blocks is not None:
            return replace(settings, num_blocks=config.kv_blocks)
        if config.kv_memory is not None:
            settings.check()
            block_bytes = settings.layout().block_bytes
            if config.kv_memory < block_bytes:
                raise SettingsError(
                    f"--kv-memory is {config.kv_memory} bytes; a KV block of this model needs "
                    f"{block_bytes}: raise --kv-memory"
                )
            return replace(settings, num_blocks=config.kv_memory // block_bytes)
        return settings

    def check(self) -> None:
        """Raise SettingsError, which names the field and the value."""
        check_bounds(self, EngineConfig)
        check_bounds(self, SimConfig, prefix="--sim-")
        if self.num_blocks < 1:
            raise SettingsError(f"sim num_blocks is {self.num_blocks}; it must be at least 1")
        if self.max_model_len < 2:
            raise SettingsError(f"--max-model-len is {self.max_model_len}; it must be at least 2")
        if self.kv_heads % self.kv_shards:
            raise SettingsError(
                f"sim kv_shards is {self.kv_shards}; it must divide kv_heads, {self.kv_heads}"
            )
        if self.dtype not in ITEM_BYTES:
            raise SettingsError(f"sim dtype is {self.dtype!r}; use one of {', '.join(ITEM_BYTES)}")
        if self.head_dim * ITEM_BYTES[self.dtype] % WORD_BYTES:
            raise SettingsError(
                f"sim head_dim is {self.head_dim}; in {self.dtype} it must be a multiple of "
                f"{WORD_BYTES // ITEM_BYTES[self.dtype]}"
            )
        if self.pooling and self.speculative_config is not None:
            raise SettingsError("--speculative-config drafts tokens, and --runner pooling has none")
        if self.runner == "generate" and self.classes:
            raise SettingsError(
                f"--sim-classes {self.classes} is for a pooling engine, and --runner is generate"
            )
        if not 0 <= self.first_id < self.end_id <= self.vocab_size:
            raise SettingsError(
                f"sim says ids in [{self.first_id}, {self.end_id}); they must be within "
                f"[0, {self.vocab_size})"
            )
        if self.poison_token is not None and self.first_id <= self.poison_token < self.end_id:
            raise SettingsError(
                f"sim poison_token is {self.poison_token}; it must not be one of the ids that the "
                f"simulated model says, [{self.first_id}, {self.end_id})"
            )

    def layout(self) -> KVLayout:
        layout = KVLayout(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            chunk_blocks=self.chunk_blocks or 1,
            kv_shards=self.kv_shards,
            groups=self.groups,
        )
        if self.chunk_blocks is not None:
            return layout
        chunk_blocks = default_chunk_blocks(layout.chunk_bytes, layout.kv_shards)
        return msgspec.structs.replace(layout, chunk_blocks=chunk_blocks)

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the simulated model. Engines with the same geometry have the same one,
        whatever their names and speeds, because they write the same KV bytes for the same
        tokens. A pooling engine has another one: no node takes over another kind of request."""
        shape = (self.vocab_size, self.layers, self.kv_heads, self.head_dim)
        tensor = TensorDigest(name="sim", shape=shape, dtype=self.dtype, digest=FORMULA)
        settings = asdict(self)
        names = settings.keys() - NO_KV_SETTINGS - POOLING_SETTINGS
        counted = {name: settings[name] for name in names}
        if self.pooling:
            counted["pooling"] = self.pooling
        return fingerprint([tensor], self.layout(), json.dumps(counted, sort_keys=True))


def build_sim(
    settings: SimSettings,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    free: Callable[[], int | None] = free_memory,
) -> EngineCore:
    """Build a simulated engine. `clock` and `sleep` are in seconds. `free` returns this machine's
    free memory in bytes, or None if it is unknown. Raises SettingsError."""
    settings.check()
    layout = settings.layout()
    info = EngineInfo(
        kind="sim",
        model=settings.model,
        fingerprint=settings.fingerprint(),
        layout=layout,
        num_blocks=settings.num_blocks,
        max_model_len=min(
            settings.max_model_len,
            layout.tokens_in(settings.num_blocks),
        ),
        max_batched_tokens=settings.max_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_logprobs=(
            settings.vocab_size if settings.max_logprobs == ALL_LOGPROBS else settings.max_logprobs
        ),
        vocab_size=settings.vocab_size,
        eos_ids=settings.eos_ids,
        pooling=settings.pooling,
        vector_size=(settings.classes or VECTOR_SIZE) if settings.pooling else 0,
        # Its arithmetic is on integers modulo 2^64: no order of steps, rows or sums changes a bit.
        exact="bitwise",
    )
    if not settings.overcommit:
        pool = settings.num_blocks * layout.block_bytes
        check_asked({"--kv-memory": pool, "--host-kv-memory": settings.host_kv_memory}, free())
    memory = SimMemory(layout, settings.num_blocks)
    host_slots = slots_for(settings.host_kv_memory, layout)
    runner = SimRunner(
        memory,
        Vocabulary(
            first=settings.first_id,
            end=settings.end_id,
            eos_ids=settings.eos_ids,
            eos_every=settings.eos_every,
        ),
        Timing(
            prefill_base_ms=settings.prefill_base_ms,
            prefill_ms_per_token=settings.prefill_ms_per_token,
            decode_ms=settings.decode_ms,
            decode_ms_per_seq=settings.decode_ms_per_seq,
        ),
        poison=settings.poison_token,
        pooling=settings.pooling,
        classes=settings.classes,
        clock=clock,
        sleep=sleep,
    )
    resources = SimResources(settings, info, runner, host_slots)
    parts = resources.start()
    return EngineCore(
        *(parts.info, parts.runner, parts.host),
        overlap=settings.overlap,
        drafter=parts.drafter,
        scheduling=settings.scheduling,
        step_log=StepLog.of(settings.log_steps),
        resources=resources,
    )


class SimResources:
    """Resources without weights: only the pool's memory is freed."""

    def __init__(
        self, settings: SimSettings, info: EngineInfo, runner: SimRunner, host_slots: int
    ) -> None:
        self._settings = settings
        self._info = info
        self._runner = runner
        self._host_slots = host_slots

    def free_kv(self) -> None:
        self._runner.memory.free()

    def restore_kv(self) -> None:
        """The kernel gives pages at their first use."""

    def free_weights(self, level: SleepLevel) -> None:
        """There are none."""

    def restore_weights(self) -> None:
        """There are none."""

    def replace_weights(self, weights: Path | Mapping[str, Any]) -> None:
        raise SettingsError("the simulated engine has no weights to replace")

    def start(self) -> EngineParts:
        memory, slots, settings = self._runner.memory, self._host_slots, self._settings
        return EngineParts(
            self._info,
            self._runner,
            CopiedBlocks(memory, slots) if slots else None,
            make_drafter(
                settings.speculative_config, settings.vocab_size, overlap=settings.overlap
            ),
        )
