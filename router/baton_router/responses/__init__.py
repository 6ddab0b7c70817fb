"""OpenAI's Responses API: its bodies, its answers and events, and the responses that are kept."""
