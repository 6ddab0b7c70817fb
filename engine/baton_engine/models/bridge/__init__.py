"""Models without a family of our own: transformers' modelling code over Baton's paged cache.

In: a config.json that transformers knows. Out: a ModelConfig, and a model that computes steps as
`models.decoder` does. `config` reads the folder's files without torch until it knows that the
bridge is needed; `source` finds transformers' classes and refuses what cannot be served; `learn`
runs the model once without memory to see how its layers attend; `attention` is what transformers
calls for each layer; `weights` loads a checkpoint; `products` and `kernels` give its parts faster
operations; `model` computes steps. The folder beside these has encoders.
"""
