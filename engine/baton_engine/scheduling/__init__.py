"""Choose the sequences of a step and the number of tokens each computes. No torch."""
