"""The engine process's start: builds the engine, measures it, starts the loop."""
