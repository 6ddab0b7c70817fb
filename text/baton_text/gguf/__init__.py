"""A model in one GGUF file: what the small files of a Hugging Face folder would say about it.

header      reads metadata and the list of tensors
metadata    typed reads of metadata
config      the contents of config.json and generation_config.json
tokenizer   the contents of tokenizer.json, tokenizer_config.json and the chat template
pretokens   how the text is split before BPE, by the name that the file has for it
"""
