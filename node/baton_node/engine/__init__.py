"""The engine process: it builds and measures the engine, runs the step loop and reports load.

The packages of the two roles implement fetching and publishing; `roles` declares their Protocols.
"""
