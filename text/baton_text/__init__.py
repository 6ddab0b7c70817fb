"""Text to ids and back, without torch and without transformers.

In: a model's small files ("artifacts"), messages, ids. Out: prompts as ids, and text as it may be
shown while ids arrive. The router uses it to tokenize once, nodes to detokenize, the engine for its
offline API; importing transformers instead would cost each of them 3 s and 750 MiB.

    artifacts    which files of a model folder text needs; the simulated engine's own set
    bytelevel    byte-level BPE's alphabet: one printable character per byte
    pieces       what bytes one token stands for, for the decoders that language models use
    tokenizer    Tokenizer: encode, decode, EOS ids
    chat         ChatTemplate: messages to prompt
    detokenizer  E(ids, stop): text that may be shown once these ids are known, and its increments
    offsets      where in a text the text of each token begins
    grammar      which tokens may come next, so that an answer matches a schema or a regex
    parsers/     what a model wrote, told apart: reasoning, content, calls of functions
    logprobs     log-probabilities with their tokens' texts
    defaults     sampling defaults of generation_config.json
"""
