"""What the classes of the offline API share: LLM, LLMEngine and, in the node's room, AsyncLLM.

    arguments        the keyword arguments of these classes, with vLLM's names for Baton's options
    parameters       SamplingParams with what only a caller in this process may ask for
    prompts          the forms in which a caller gives a prompt
    model_text       a model's tokenizer, chat template and default parameters
    outputs          what a caller gets: RequestOutput and its parts
    running_request  one request while it runs: tokens in, RequestOutputs out
    progress_bar     the bar of LLM.generate

Imports no torch: AsyncLLM's own process has no engine.
"""
