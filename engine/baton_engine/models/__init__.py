"""Model code: one decoder skeleton (`decoder`), its families (`registry`), and their parts.

In: token ids, positions and a StepAttention. Out: hidden states and logits. Weights are declared as
named slots (`slots`) that the loader fills.
"""
