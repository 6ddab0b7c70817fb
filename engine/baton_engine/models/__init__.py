"""Models: one decoder (`decoder`) and the families built on it (`registry`).

In: token ids, positions and a StepAttention. Out: hidden states and logits. A model declares its
weights as named slots (`layers.parameter`), and the loader fills them.
"""
