"""The decode role: fetches prompts' KV, generates, streams.

role     DecodeRole: which jobs it takes
serve    serve(settings): one decode node until SIGTERM or SIGINT
"""

from baton_decode_node.admission import DecodeRole
from baton_decode_node.serve import serve

__all__ = ["DecodeRole", "serve"]
