"""Models: one decoder (`decoder`), and a module or folder for each family in `config.families`.

In: token ids, positions and a StepAttention. Out: hidden states and logits. A model declares its
weights as named parameters (`layers.parameter`), and the loader fills them. A family's parser of
config.json imports no torch; its model class is imported when a model is built.
"""
