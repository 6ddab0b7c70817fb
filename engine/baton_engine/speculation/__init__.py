"""Drafts of the next tokens, checked in the step that computes them; answers stay the same.

A Proposer guesses the tokens after a sequence's last one. The step computes them like known tokens
and samples after each. The noise of a sample depends on its position alone, so each sample is the
token that a step without drafts would sample there, as long as the drafts before it are right.
"""
