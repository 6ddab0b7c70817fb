"""What a node can do, learnt from what nodes report."""
