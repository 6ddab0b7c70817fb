"""OpenAI's API: parsing bodies, checking fields, and the JSON of answers."""
