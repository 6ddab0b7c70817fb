"""Encoders, such as BERT: each token sees all tokens of its text, so nothing is cached.

In: a config.json of an encoder that transformers knows. Out: a ModelConfig, and a model that
answers a whole prompt with a vector, or with the scores of its classes. `config` reads the folder's
files; `source` finds transformers' classes and the sizes of a model; `attention` is what they call
for each layer; `model` answers prompts.
"""
