"""Oracles: worked examples with known results from the field of LLM serving. This module lists the
oracles that are tested here, and why the others are not.

The id of an oracle is O-<section>-<number>. A test has the ids that it checks in its name
(`test_..._O_BLK_1`). REFERENCE lists all ids. Each is in TESTED or in NOT_APPLICABLE, which gives
the reason. DIFFERENCES lists the tested oracles that Baton satisfies in another form, on purpose.
`test_applicability.py` compares these lists with the tests.
"""

from __future__ import annotations

from collections.abc import Mapping


def ids(section: str, numbers: str) -> tuple[str, ...]:
    return tuple(f"O-{section}-{number}" for number in numbers.split())


REFERENCE: tuple[str, ...] = (
    *ids("MEM", "1 1b 2 3 4 4b 4c 5 5b 5c 5d 5e 6 6b 6c 7 7b 7c 7d 7e 8 8b 9 9b 9c 9d"),
    *ids("MEM", "10 10b 11 12 12b 13 14"),
    *ids("XFR", "1 1b 1c 1d 2"),
    *ids("PRF", "1 1b 2 2b 2c 3 4"),
    *ids("BLK", "1 2 3 4 5 6 7 8 8b 8c 9 10 10b 11 12"),
    *ids("PFX", "1 2 2b 3 4 5 6 7 8 9 10"),
    *ids("SCH", "1 2 3 3b 3c 4 5 6 7 8 9 10 10b 11 11b 12 13 14 15 16"),
    *ids("REQ", "1 2 3 3b 3c 3d 3e 3f 4 5 6"),
    *ids("OUT", "1 1b 2 3 3b 3c 3d 4 5 6"),
    *ids("TOK", "1 2 3 4"),
    *ids("SMP", "1 2 2b 2c 2d 3 3b 3c 4 4b 4c 4d 4e 5 6 6b 7 7b 7c 7d 8 9"),
    *ids("MDL", "1 1b 2 3 4 5 5b 5c 5d 5e 5f 6 7 8 8b 8c 8d 8e 9 9b 10 11"),
    *ids("SPD", "1 2 2b 2c 3 4 5 5b 6 6b 7 8 9"),
    *ids("QNT", "1 2 2b 3 4 5"),
    *ids("DST", "1 2 2b 3 4 5 5b 6 7 7b 8"),
    *ids("NAN", "1 1b 1c 2 3 4"),
)

TESTED: tuple[str, ...] = (
    *ids("MEM", "1 1b 2 3 4 4b 4c 5 5b 5c 5d 5e 6 6b 6c 7d 8 8b 10b 12 12b 13 14"),
    *ids("XFR", "1 1b 1c 1d 2"),
    *ids("PRF", "1 1b 2 2b 2c 3 4"),
    *ids("BLK", "1 2 3 4 5 6 7 8 8b 8c 9 10 10b 11 12"),
    *ids("PFX", "1 2 2b 3 4 5 6 7 8 9 10"),
    *ids("SCH", "1 2 3 3b 3c 4 5 6 7 8 9 10 10b 11 11b 12 13 14 15 16"),
    *ids("REQ", "1 2 3 3b 3c 3d 3e 3f 4 5 6"),
    *ids("OUT", "1 1b 2 3 3b 3c 3d 4 5 6"),
    *ids("SMP", "1 2 2b 2c 2d 3 3b 3c 4 4b 4c 4d 4e 5 6 6b 7 7b 7c 7d 8 9"),
    *ids("MDL", "1 1b 2 3 5 5b 5c 5d 5e 5f 6 7 8 8c 8d 8e 9 9b 10 11"),
    *ids("SPD", "1 2 2b 2c 3 4 6 6b 8 9"),
    *ids("QNT", "1 2 2b 3 4 5"),
    *ids("NAN", "1 1b 1c 4"),
)

NOT_APPLICABLE: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ids("MEM", "7 7b 7e 9 9b 9c 9d"),
        "a request has blocks for its known tokens only, so no memory is reserved for its maximum "
        "length",
    ),
    (ids("MEM", "7c"), "a rounded estimate in decimal units; O-MEM-7d is exact"),
    (ids("MEM", "10 11"), "there is no contiguous allocator; paging is O-MEM-10b"),
    (
        ids("TOK", "1 2 3 4"),
        "the tokenizers of Llama 2, GPT-2, LLaMA and Qwen are downloads with their own licences, "
        "and no package that the tests install contains them (tiktoken has none, litellm only "
        "cl100k_base); tests/text compares encoding with transformers on generated tokenizers and "
        "on the demo model's",
    ),
    (
        ids("MDL", "4"),
        "a step has no batch dimension, attention weights exist for some tokens at a time, and "
        "logits are computed only for positions that are sampled or scored",
    ),
    (ids("MDL", "8b"), "no model family of Baton's own has a LayerNorm"),
    (
        ids("SPD", "5 5b"),
        "there is no rejection sampler: the target samples its own token at each position, with "
        "the noise of that position, and a draft is right if it equals that token",
    ),
    (ids("SPD", "7"), "the drafts of a sequence are one chain; there are no trees"),
    (
        ids("DST", "1 2 2b 3 4 5 5b 6 7 7b 8"),
        "an engine is one process on one device, without tensor, pipeline or data parallelism",
    ),
    (ids("NAN", "2"), "there are no workers that receive a sequence's state"),
    (
        ids("NAN", "3"),
        "the sign of a step's count does not distinguish prefill and decode: a step mixes both, "
        "and StepResult counts tokens, prompt tokens and sequences separately",
    ),
)

DIFFERENCES: Mapping[str, str] = {
    "O-MEM-1": "the codes alone in 8 and 4 bits; scales, and what is not quantized, come on top",
    "O-MEM-1b": "as O-MEM-1, in all four sizes",
    "O-MEM-2": "and all of O-MEM and O-XFR: bfloat16 in place of FP16, with the same bytes",
    "O-MEM-5d": "an engine without a block does not start, and the error gives the reason",
    "O-MEM-5e": "one tensor holds all layers: [blocks, layers, 2, kv_heads, block_size, head_dim]",
    "O-MEM-6c": "13 blocks fewer after a profiling run: 384 MiB are spare, and 1 block is padding",
    "O-MEM-7d": "in blocks (431); there is no function for the other counts",
    "O-MEM-8": "in 16 bits, as O-MEM-8b; quantized weights also have scales and plain parts, which "
    "change the numbers",
    "O-MEM-14": "KV down to 8 bits, weights down to 4; nothing is stored with 3 or 2 bits",
    "O-XFR-1d": "the scales are exponents of one byte, one for the row of each head and token",
    "O-XFR-2": "as the price of placement, which is the lower of fetching and computing",
    "O-QNT-1": "as O-MEM-1 and O-MEM-14",
    "O-QNT-4": "only E4M3: no code is E5M2",
    "O-QNT-5": "only the codes, as in O-XFR-1d",
    "O-SPD-6b": "drafts end where the longest sequence does, so no later position is computed",
    "O-PRF-3": "only the work with a cache, because the engine always has one",
    "O-PRF-4": "as scores in the memory estimate",
    "O-BLK-6": "blocks 1, 2 and 3 are shared, because block 0 is padding",
    "O-BLK-8": "num_blocks, total_blocks and all counts exclude block 0",
    "O-BLK-9": "B, C and D finish after their prompt, and a hold keeps their blocks",
    "O-BLK-10": "without lookahead slots: 100 slots also need 7 blocks",
    "O-BLK-10b": "a reservation holds the blocks, and landed blocks are registered in the cache",
    "O-PFX-4": "further blocks with the same hash are in a list, not in a dict by block id",
    "O-PFX-9": "a request with prompt_logprobs does not read the cache either",
    "O-SCH-1": "the token budget limits a piece: no threshold holds for a prompt that is alone",
    "O-SCH-3": "as O-SCH-1, with a budget of 8",
    "O-SCH-6": "no sequence exceeds the cap, because it finishes at max_model_len",
    "O-SCH-9": "as all of static batching: counted by the bench; the engine does not batch so",
    "O-SCH-13": "without time units: each step has B's token and a piece of A's prompt",
    "O-SCH-15": "the node parks requests that are not ready, so they are not in a scheduler queue",
    "O-REQ-1": "the engine's state follows from reservations and queues; that of a request whose "
    "grammar is compiled is the node's `compiling`",
    "O-REQ-5": "results keep the order of the prompts; ids are 'offline-' plus a counter",
    "O-REQ-6": "prompts are a required argument; an empty prompt raises InvalidRequest",
    "O-OUT-1b": "only the five entries of GPT-2's vocabulary, with their ids",
    "O-OUT-2": "the content of the empty delta is an empty string",
    "O-OUT-3": "in the router the pieces stay separate, and are written at once",
    "O-OUT-3d": "the reader gets the items before the error, and then the error",
    "O-SMP-4b": "the smallest set, which has four tokens",
    "O-NAN-4": "up to 256, each 8th size is recorded instead of each 16th; --max-num-seqs is the "
    "largest",
    "O-MDL-8d": "in the form with tanh only; no model family of Baton's own has the exact one",
    "O-MDL-6": "for GPT-2 only the rule for head_dim; its architecture is not supported",
}
