"""The prefill role: computes prompts, publishes their KV, samples the first tokens.

role     PrefillRole: which jobs it takes
serve    serve(settings): one prefill node until SIGTERM or SIGINT
"""

from baton_prefill_node.admission import PrefillRole
from baton_prefill_node.serve import serve

__all__ = ["PrefillRole", "serve"]
