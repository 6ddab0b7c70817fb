"""The keyword arguments of LLM, LLMEngine and AsyncLLM: Baton's options, by their own names or by
vLLM's.

Baton's own are the fields of EngineConfig. For vLLM's, tables say which have another name here
(RENAMED), may only have the value that Baton always has (ONLY), have no use here, whatever their
value (UNUSED), or cannot be honoured, with what to do instead (REFUSED). None always means the
default. Any other name is a TypeError that names the nearest one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from baton_engine.config.engine_config import EngineConfig, LoadFormat, TorchSettings
from baton_engine.config.model_folder import ModelFolder, locate_model, read_config
from baton_engine.errors import SettingsError
from baton_engine.offline.model_text import ModelText, read_text

OPTIONS = tuple(field.name for field in fields(EngineConfig))
GIB = 1 << 30
# vLLM's name -> Baton's. IN_GIB: vLLM's value is in GiB, Baton's in bytes.
RENAMED: Mapping[str, str] = {
    "max_num_batched_tokens": "max_batched_tokens",
    "num_gpu_blocks_override": "kv_blocks",
    "kv_cache_memory_bytes": "kv_memory",
    "kv_offloading_size": "host_kv_memory",
    "swap_space": "host_kv_memory",
    "async_scheduling": "overlap",
}
IN_GIB = ("kv_offloading_size", "swap_space")
ONLY: Mapping[str, tuple[Any, str]] = {
    "tokenizer_mode": ("auto", "a model's own tokenizer.json is the only kind"),
    "config_format": ("auto", "config.json or a GGUF file's metadata is the only kind"),
    "task": (("auto", "generate"), "runner says what an engine gives"),
    "convert": (("auto", "none"), "runner says what an engine gives"),
    "generation_config": ("auto", "the defaults are the model's; give SamplingParams for others"),
    "trust_remote_code": (False, "no code of a model's repository is run"),
    "tensor_parallel_size": (1, "an engine has one device; a pool has several nodes"),
    "pipeline_parallel_size": (1, "an engine has one device; a pool has several nodes"),
    "data_parallel_size": (1, "an engine has one device; a pool has several nodes"),
    "distributed_executor_backend": (("uni", "mp"), "an engine has one device"),
    "cpu_offload_gb": (0, "weights stay on the device; quantization makes them smaller"),
    "enable_lora": (False, "engines load no adapters"),
    "enable_prompt_embeds": (False, "a prompt is text or token ids"),
}
UNUSED = (
    *("disable_log_stats", "disable_custom_all_reduce", "disable_cascade_attn"),
    *("enable_sleep_mode", "use_tqdm_on_load", "max_parallel_loading_workers"),
)
REFUSED: Mapping[str, str] = {
    "hf_token": "set HF_TOKEN",
    "hf_overrides": "change the folder's config.json",
    "download_dir": "set HF_HOME",
    "compilation_config": "enforce_eager turns CUDA graphs off",
    "attention_backend": "kernels chooses the code: auto, torch or triton",
    "quantization_config": "it is read from the checkpoint; quantization rounds a plain one",
    "override_generation_config": "give SamplingParams",
    "cudagraph_capture_sizes": "graphs have the sizes that max_num_seqs needs",
}
KV_DTYPES = {"fp8_e4m3": "fp8"}
DTYPES = {"float": "float32", "half": "float16"}
# Formats of plain files, which need no other reader than "auto".
PLAIN_FORMATS = ("safetensors", "hf", "gguf")
# vLLM's short forms of keys in speculative_config.
SPEC_KEYS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}


class EngineArgs:
    """The arguments of an engine and of its text. Its attributes are those that need a look at
    something else than EngineConfig; `options` are the fields of EngineConfig that are not the
    default. Raises TypeError for an unknown name, and SettingsError for a value that cannot be."""

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        skip_tokenizer_init: bool = False,
        chat_template: Path | str | None = None,
        load_format: str = "auto",
        quantization: str | None = None,
        served_model_name: str | Sequence[str] | None = None,
        name: str = "",
        seed: int | None = None,
        stream_interval: int = 1,
        **options: Any,
    ) -> None:
        self.model = str(model)
        self.tokenizer = None if tokenizer is None else str(tokenizer)
        self.revision = revision or ""
        self.tokenizer_revision = tokenizer_revision or ""
        self.skip_tokenizer_init = skip_tokenizer_init
        self.chat_template = chat_template
        self.load_format = _load_format(load_format)
        self.quantization = quantization
        self.name = name or _first(served_model_name)
        self.seed = seed
        self.stream_interval = stream_interval
        if stream_interval < 1:
            raise SettingsError(f"stream_interval is {stream_interval}; use 1 or more")
        self.options = engine_options(options)
        self._folder: ModelFolder | None = None

    @property
    def folder(self) -> ModelFolder:
        """The model's folder or file; a hub's model is fetched first. Raises ModelError."""
        if self._folder is None:
            self._folder = locate_model(self.model, self.revision)
        return self._folder

    def tokenizer_path(self) -> Path | None:
        """The folder of another tokenizer than the model's. Raises ModelError."""
        if self.tokenizer is None or self.tokenizer == self.model:
            return None
        return locate_model(self.tokenizer, self.tokenizer_revision, option="tokenizer").path

    def read_text(self) -> ModelText | None:
        """Raises ModelError or ArtifactError."""
        if self.skip_tokenizer_init:
            return None
        return read_text(self.folder.path, self.chat_template, self.tokenizer_path())

    def engine_options(self) -> dict[str, Any]:
        """`options` and the quantization, which depends on the checkpoint."""
        return self.options | {"quantization": self._quantization()}

    def torch_settings(self) -> TorchSettings:
        """Raises ModelError or SettingsError."""
        return TorchSettings(
            model=self.folder.path,
            name=self.name or self.folder.name,
            load_format=self.load_format,
            **self.engine_options(),
        )

    def _quantization(self) -> str:
        """ "none" for the checkpoint's own method: that is found without the argument."""
        given = self.quantization or "none"
        own = read_config(self.folder.path).get("quantization_config") if self.model else None
        is_own = isinstance(own, dict) and own.get("quant_method") == given
        return "none" if is_own or (given == "gguf" and self.model.endswith(".gguf")) else given


AsyncEngineArgs = EngineArgs  # vLLM's name of the same for AsyncLLM


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of EngineConfig that these keyword arguments stand for."""
    options: dict[str, Any] = {}
    drafts: dict[str, Any] = {}
    for name, value in given.items():
        if name in OPTIONS:
            options[name] = _value(name, value)
        elif name in RENAMED:
            ours = RENAMED[name]
            if ours in given:
                raise SettingsError(f"{name} and {ours} are the same option; leave out one of them")
            options[ours] = _renamed(name, value)
        elif name in SPEC_KEYS:
            if value is not None:
                drafts[SPEC_KEYS[name]] = value
        elif name in ONLY:
            _check_only(name, value)
        elif name in REFUSED:
            if value is not None:
                raise SettingsError(f"{name} is not supported: {REFUSED[name]}")
        elif name not in UNUSED:
            raise TypeError(f"{name} is unknown{_nearest(name)}")
    if drafts:
        if options.get("speculative_config") is not None:
            raise SettingsError("give speculative_config or spec_method, not both")
        options["speculative_config"] = json.dumps(drafts)
    return {name: value for name, value in options.items() if value is not None}


def _renamed(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "async_scheduling":
        return "on" if value else "off"
    return int(value * GIB) if name in IN_GIB else value


def _value(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "dtype":
        text = str(value).removeprefix("torch.")
        return DTYPES.get(text, text)
    if name == "kv_cache_dtype":
        return KV_DTYPES.get(value, value)
    if name == "speculative_config" and isinstance(value, Mapping):
        return json.dumps(dict(value))
    return value


def _check_only(name: str, value: Any) -> None:
    only, why = ONLY[name]
    allowed = only if isinstance(only, tuple) else (only,)
    if value is not None and value not in allowed:
        shown = " or ".join(map(repr, allowed))
        raise SettingsError(f"{name} is {value!r}; it can only be {shown}: {why}")


def _load_format(given: str) -> LoadFormat:
    return "auto" if given in PLAIN_FORMATS else given  # type: ignore[return-value]


def _first(names: str | Sequence[str] | None) -> str:
    if names is None or isinstance(names, str):
        return names or ""
    return names[0] if names else ""


def _nearest(name: str) -> str:
    own = ("model", "tokenizer", "revision", "chat_template", "load_format", "seed")
    close = get_close_matches(name, (*OPTIONS, *RENAMED, *ONLY, *own), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
