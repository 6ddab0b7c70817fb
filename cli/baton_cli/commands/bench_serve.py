"""`baton bench serve`: sends load to any server with OpenAI's API and measures what clients see.

In: ServeOptions; the variable OPENAI_API_KEY. Out: figures on stdout, and in a JSON file if one is
named; exit code 1 if a request failed, unless --allow-failures is set.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from baton_cli.bench.arrivals import arrivals, parse_rate
from baton_cli.bench.client import Server, TimedRequest, first_model, open_session, send_all
from baton_cli.bench.engine import DEMO, demo_folder, read_tokenizer
from baton_cli.bench.report import ProgressBar
from baton_cli.bench.serve_metrics import Json, MetricChoice, details_of, figures
from baton_cli.bench.serve_options import ServeOptions
from baton_cli.bench.serve_report import serve_text
from baton_cli.bench.serve_workload import Planned, Speaker, check_prompts, is_self_timed, plan
from baton_cli.bench.stream import RequestOutcome
from baton_cli.errors import CommandError, UsageError
from baton_cli.logs import configure
from baton_cli.models.local_folder import find_model
from baton_text.tokenizer import Tokenizer

KEY_VARIABLE = "OPENAI_API_KEY"
BYTES = "bytes"
SELF_TIMED = "trace"
TIME_FORMAT = "%Y%m%d-%H%M%S"


def run(options: ServeOptions) -> int:
    configure(options.log_level, options.json_logs)
    rate = parse_rate(options.request_rate)
    wanted = MetricChoice.read(
        options.percentile_metrics, options.metric_percentiles, options.goodput
    )
    server = server_of(options, os.environ.get(KEY_VARIABLE, ""))
    check_prompts(options)
    _check_results(options)
    tokenizer = _read_tokenizer(options)
    draw_arrivals = partial(arrivals, rate=rate, burstiness=options.burstiness, seed=options.seed)
    planned = plan(options, tokenizer, draw_arrivals)
    model, outcomes, duration = asyncio.run(_load(options, server, planned, tokenizer))
    report = _setting_of(options, model) | {"num_prompts": len(planned)}
    report |= figures(outcomes, duration, wanted)
    print(serve_text(report, wanted), flush=True)
    more = details_of(outcomes) if options.save_detailed else {}
    for path in _result_paths(options, report):
        _write_figures(path, report | more)
    return 1 if report["failed"] and not options.allow_failures else 0


def server_of(options: ServeOptions, key: str) -> Server:
    """Return the server's URLs and the requests' headers; raise UsageError."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    base = (options.base_url or f"http://{host}:{options.port}").rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {options.base_url}: give http://HOST:PORT")
    if not options.endpoint.startswith("/"):
        raise UsageError(f"--endpoint {options.endpoint}: give a path, as /v1/completions")
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    for text in options.header:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"--header {text}: give NAME=VALUE")
        headers[name] = value
    return Server(
        base=base,
        url=base + options.endpoint,
        headers=headers,
        timeout_s=options.request_timeout,
    )


async def _load(
    options: ServeOptions, server: Server, planned: list[Planned], tokenizer: Tokenizer | None
) -> tuple[str, list[RequestOutcome], float]:
    """Send the load. Return the model's name, the outcomes, and the duration in seconds."""
    total = sum(request.item.new_tokens for request in planned)
    async with open_session() as http:
        model = options.model or await first_model(http, server)
        speaker = Speaker(options, model, tokenizer)
        requests = [
            TimedRequest(
                request.at,
                speaker.body(request.item),
                request.item.new_tokens,
                len(request.item.prompt),
            )
            for request in planned
        ]
        send = partial(send_all, http, server, max_concurrency=options.max_concurrency)
        warm, _ = await send(
            [requests[0]._replace(at=0.0)] * options.num_warmups, progress=_ignore_progress
        )
        _check_warm(warm)
        with ProgressBar(sys.stderr, total, time.perf_counter) as bar:
            progress = _ignore_progress if options.disable_tqdm else bar.add
            outcomes, duration = await send(requests, progress=progress)
    return model, outcomes, duration


def _check_warm(outcomes: list[RequestOutcome]) -> None:
    """Raise CommandError if a warm-up request failed: the measured requests would fail too."""
    for outcome in outcomes:
        if outcome.error:
            raise CommandError(f"a warm-up request failed: {outcome.error}")


def _read_tokenizer(options: ServeOptions) -> Tokenizer | None:
    if not options.tokenizer:
        return None
    if options.tokenizer == BYTES:
        return read_tokenizer(None)
    if options.tokenizer == DEMO:
        return read_tokenizer(demo_folder())
    return read_tokenizer(find_model(options.tokenizer, weights=False).path)


def _setting_of(options: ServeOptions, model: str) -> Json:
    """The run's settings, which precede the figures."""
    return {
        "date": datetime.now().strftime(TIME_FORMAT),
        "backend": "openai",
        "endpoint": options.endpoint,
        "model_id": model,
        "dataset": options.dataset_name,
        "request_rate": SELF_TIMED if is_self_timed(options) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "ignore_eos": options.ignore_eos,
    }


def _check_results(options: ServeOptions) -> None:
    if options.save_detailed and not (options.save_result or options.output_json):
        raise UsageError("--save-detailed needs --save-result or --output-json FILE")
    if options.output_json and not Path(options.output_json).expanduser().parent.is_dir():
        raise CommandError(f"--output-json {options.output_json}: the folder does not exist")


def _result_paths(options: ServeOptions, report: Json) -> list[Path]:
    paths = [Path(options.output_json).expanduser()] if options.output_json else []
    if options.save_result:
        model = report["model_id"].replace("/", "-")
        paths.append(Path(f"baton-{report['request_rate']}qps-{model}-{report['date']}.json"))
    return paths


def _write_figures(path: Path, report: Json) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise CommandError(f"cannot write the figures to {path}: {error}") from error
    print(f"written to {path}", flush=True)


def _ignore_progress(tokens: int) -> None:
    """Ignore progress: for warm-ups and --disable-tqdm."""
