"""Which worked examples of the field are tests here, and why the others are not.

An oracle's id is O-<section>-<number>; a test carries the ids that it checks in its name
(`test_..._O_BLK_1`). REFERENCE lists all there are. Each is in TESTED or in NOT_APPLICABLE, which
gives the reason. DIFFERENCES say where a tested one is met in another form, on purpose.
`test_applicability.py` holds all this against the tests.
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
    *ids("PRF", "3 4"),
    *ids("BLK", "1 2 3 4 5 6 7 8 8b 8c 9 10 10b 11 12"),
    *ids("PFX", "1 2 2b 3 4 5 6 7 9 10"),
    *ids("SCH", "1 3 3b 3c 4 5 6 7 8 11 12 13 14 15 16"),
    *ids("REQ", "1 2 3 3b 3c 3d 3e 3f 4 5 6"),
    *ids("OUT", "1 1b 2 3 3c 3d 4 5 6"),
    *ids("SMP", "1 2 2b 2c 2d 3 3b 3c 4 4b 4c 4d 4e 5 6 6b 7 7b 7c 7d 8 9"),
    *ids("MDL", "1 1b 2 3 5 5b 5c 5d 5e 5f 6 7 8 8c 8e 9 9b 10 11"),
    *ids("QNT", "1 5"),
    *ids("NAN", "1 1b 1c 4"),
)

NOT_APPLICABLE: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ids("MEM", "7 7b 7e 9 9b 9c 9d"),
        "nothing is reserved for a request's longest length, so there is no reservation to waste: "
        "a request has blocks for the tokens it knows",
    ),
    (ids("MEM", "7c"), "a rounded estimate in decimal units; O-MEM-7d is the exact one"),
    (ids("MEM", "10 11"), "there is no contiguous allocator; paging is O-MEM-10b"),
    (
        ids("PRF", "1 1b 2 2b 2c"),
        "a model of a GPU's memory and arithmetic; nodes measure their speeds",
    ),
    (
        ids("PFX", "8"),
        "there is one KV-cache group: a block holds the KV of all layers, those with a window too",
    ),
    (
        ids("SCH", "2"),
        "it needs long_prefill_token_threshold, a cap on one prompt's piece below the step's "
        "budget; the scheduler has the budget alone, and with one of 256 the decodes and the "
        "piece share the 256",
    ),
    (ids("SCH", "9 10 10b 11b"), "there is no static batching to compare with"),
    (ids("OUT", "3b"), "there are no cumulative outputs: nodes send what is new, and only that"),
    (
        ids("TOK", "1 2 3 4"),
        "Llama 2's, GPT-2's, LLaMA's and Qwen's tokenizers are downloads with their own licences, "
        "in no package that tests install; ids of vocabularies made up here would prove nothing. "
        "Encoding is compared with transformers on built tokenizers and the demo model's "
        "(tests/text)",
    ),
    (
        ids("MDL", "4"),
        "a step is flat, without a batch dimension; attention weights are made for some tokens at "
        "a time at most, and logits of those positions alone that are sampled or scored",
    ),
    (ids("MDL", "8b"), "no model that is served has a LayerNorm"),
    (ids("MDL", "8d"), "no model that is served uses GELU; another hidden_act is refused"),
    (ids("SPD", "1 2 2b 2c 3 4 5 5b 6 6b 7 8 9"), "there is no speculative decoding"),
    (
        ids("QNT", "2 2b 3 4"),
        "no weight or KV code of 8 bits or fewer is computed; quantized checkpoints are refused",
    ),
    (
        ids("DST", "1 2 2b 3 4 5 5b 6 7 7b 8"),
        "an engine is one process on one device: no tensor, pipeline or data parallelism in it",
    ),
    (ids("NAN", "2"), "there are no workers to send a sequence's state to"),
    (
        ids("NAN", "3"),
        "a step's count has no sign: it mixes prompts and decodes, and StepResult counts tokens, "
        "prompt tokens and sequences apart",
    ),
)

DIFFERENCES: Mapping[str, str] = {
    "O-MEM-1": "in 32 and 16 bits, as O-MEM-1b; weights of fewer are refused",
    "O-MEM-2": "and all of O-MEM and O-XFR: bfloat16 stands for FP16, in which nothing is computed",
    "O-MEM-5d": "an engine without a block could serve nothing: it does not start, and says why",
    "O-MEM-5e": "one tensor holds all layers: [blocks, layers, 2, kv_heads, block_size, head_dim]",
    "O-MEM-6c": "a profiling run leaves 13 blocks fewer: 384 MiB are spare, and one is padding",
    "O-MEM-7d": "in blocks (431); what does not count blocks has no function",
    "O-MEM-8": "in 16 bits, as O-MEM-8b: no quantized weights are loaded",
    "O-MEM-14": "down to 8 bits; fewer are not stored",
    "O-XFR-1d": "the layout's sizes; the codec with its scales does not exist",
    "O-XFR-2": "seen where placement prices a fetch: it takes whichever is less",
    "O-QNT-1": "as O-MEM-1 and O-MEM-14",
    "O-QNT-5": "the layout's sizes, as in O-XFR-1d",
    "O-PRF-3": "the work with a cache; without one there is no engine",
    "O-PRF-4": "as entries of the mask that memory is planned for",
    "O-BLK-6": "blocks 1, 2, 3 are shared, since block 0 is padding",
    "O-BLK-8": "num_blocks, total_blocks and all counts leave block 0 out",
    "O-BLK-9": "B, C and D end after their prompt and a transfer's hold keeps their blocks",
    "O-BLK-10": "no lookahead: 100 slots, which are 7 blocks as well",
    "O-BLK-10b": "a reservation holds the blocks, and names are given to those that landed",
    "O-BLK-11": "no step reads the 4 blocks; they stay in the table until the request ends",
    "O-PFX-4": "blocks of one name beside the first wait in a list, not in a dict by id",
    "O-PFX-9": "the cache is always on; a request for prompt_logprobs does not read it",
    "O-SCH-1": "the step's budget, max_batched_tokens, is the piece's size; there is no threshold",
    "O-SCH-3": "as O-SCH-1, with a budget of 8",
    "O-SCH-6": "nobody comes to the cap: who reaches max_model_len has ended",
    "O-SCH-13": "no units: B's token is in the same step as A's piece, each time",
    "O-SCH-14": "by arrival alone; there is no priority policy",
    "O-SCH-15": "what is not ready is parked by the node and in no queue of the scheduler",
    "O-REQ-1": "a state is where a request stands (reservation, queues), no field; no grammars",
    "O-REQ-5": "results keep the prompts' order; ids are 'offline-' and a growing number",
    "O-REQ-6": "prompts are a required argument; an empty one raises InvalidRequest",
    "O-OUT-1b": "GPT-2's five entries alone, under their ids",
    "O-OUT-2": "the empty delta spells its content as an empty string",
    "O-OUT-3": "pieces stay apart in one batch and are written at once",
    "O-OUT-3d": "what was put before the error is still got, then the error",
    "O-SMP-4b": "the smallest set: four stay",
    "O-NAN-4": "to 256 each 8th size is recorded, not each 16th; --max-num-seqs is the largest",
    "O-MDL-6": "of GPT-2 the rule for head_dim only; its architecture is not served",
}
