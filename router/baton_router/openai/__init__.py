"""OpenAI's API: reading bodies, checking fields, and the JSON of answers."""
