"""`baton generate`: answers prompts with an engine in this process, without a pool.

In: GenerateOptions. Out: texts (or one JSON object per prompt) on stdout. torch is imported late,
after all checks of the flags that do not need it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from baton_cli.commands.generate_options import GenerateOptions
from baton_cli.errors import CommandError
from baton_cli.logs import configure
from baton_cli.models.local_folder import find_model
from baton_protocol.errors import BatonError
from baton_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from baton_engine.llm import LLM, RequestOutput


def run(options: GenerateOptions) -> int:
    configure(options.log_level, options.json_logs)
    prompts = read_prompts(options)
    folder = find_model(options.model).path
    try:
        sampling(options, SamplingParams())  # report a wrong flag before loading the weights
        outputs = _generate(options, folder, prompts)
    except BatonError as error:
        raise CommandError(str(error)) from error
    for prompt, output in zip(prompts, outputs, strict=True):
        print(json.dumps(as_json(prompt, output)) if options.json else as_text(output), flush=True)
    return 0


def read_prompts(options: GenerateOptions) -> list[str]:
    """Return --prompt, or the nonblank lines of --prompts-file ("-" is stdin). Raise CommandError
    if there is none."""
    if options.prompt:
        return [options.prompt]
    if not options.prompts_file:
        raise CommandError("nothing to answer: give --prompt or --prompts-file")
    try:
        if options.prompts_file == "-":
            text = sys.stdin.read()
        else:
            text = Path(options.prompts_file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--prompts-file {options.prompts_file}: {error}") from error
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise CommandError(f"--prompts-file {options.prompts_file} holds no prompt")
    return prompts


def sampling(options: GenerateOptions, defaults: SamplingParams) -> SamplingParams:
    """Apply the flags to the model's defaults; raise InvalidRequest for invalid parameters."""
    given = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "logprobs")
        if (value := getattr(options, name)) is not None
    }
    params: SamplingParams = msgspec.structs.replace(
        defaults,
        n=options.n,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        **given,
    )
    params.check()
    return params


def as_text(output: RequestOutput) -> str:
    """Format the answers of one prompt, numbered if there are several."""
    if len(output.outputs) == 1:
        return output.outputs[0].text
    return "\n".join(f"[{choice.index}] {choice.text}" for choice in output.outputs)


def as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """One prompt and its choices, with their token ids."""
    return {
        "prompt": prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "cached_tokens": output.cached_tokens,
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "logprobs": None
                if choice.logprobs is None
                else [
                    {str(token.id): token.logprob for token in (position.sampled, *position.top)}
                    for position in choice.logprobs
                ],
            }
            for choice in output.outputs
        ],
    }


def _generate(
    options: GenerateOptions, folder: Path, prompts: Sequence[str]
) -> list[RequestOutput]:
    try:
        from baton_engine.errors import EngineError
        from baton_engine.llm import LLM
    except ImportError as error:
        raise CommandError(
            f"the engine cannot be loaded ({error}); pip install '.[node]' in the checkout"
        ) from error
    try:
        llm: LLM = LLM(folder, **options.engine_options())
    except EngineError as error:
        raise CommandError(str(error)) from error
    params = sampling(options, llm.default_sampling_params())
    bar = len(prompts) > 1 and sys.stderr.isatty()
    if options.chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return llm.chat(chats, params, use_tqdm=bar)
    return llm.generate(prompts, params, use_tqdm=bar)
