"""gpt-oss: experts with biases and a clamped gate, attention sinks, alternating windows."""
