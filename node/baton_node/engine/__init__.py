"""The engine process: the engine is built and measured, the step loop runs it and reports its load.

Fetching and publishing are the two roles'; `roles` says what the loop asks of them.
"""
