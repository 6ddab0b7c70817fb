"""Convert text to ids and back, without torch or transformers.

In: a model's small files ("artifacts"), messages, ids. Out: prompts as ids, and text that can be
streamed while ids arrive. The router tokenizes with it, nodes detokenize, and the engine uses it in
its offline API. Importing transformers instead would cost each of them 3 s and 750 MiB.

    artifacts       reads the files that text needs from a model folder; makes the simulated
                    engine's files
    gguf/           makes these files from the metadata of a GGUF file
    bytelevel       the alphabet of byte-level BPE: one printable character per byte
    pieces          the bytes of one token, for the decoders that language models use
    tokenizer       Tokenizer: encode, decode, EOS ids
    division        finds places at which a long text can be divided and encoded in parts
    chat            ChatTemplate: messages to prompt
    conversation    fits messages to what a model's template takes
    detokenizer     E(ids, stop): text that may be shown for these ids, and its increments
    offsets         the position of each token's text in a text
    grammars/       the tokens that may come next, so that an answer matches a schema or a regex
    parsers/        splits an answer into reasoning, content and function calls
    logprobs        adds token texts to log-probabilities
    defaults        sampling defaults of generation_config.json
"""
