"""Names of the headers that clients and this router exchange."""

from __future__ import annotations

PLACEMENT_HEADER = "x-baton-placement"
EXACT_HEADER = "x-baton-exact"
POLICY_HEADER = "x-baton-policy"
RESUME_HEADER = "x-baton-resume"
LAST_EVENT_HEADER = "Last-Event-ID"
OWN_ID_HEADER = "x-baton-request-id"
ID_HEADER = "x-request-id"  # the client's own id of the request, or the router's
KEY_HEADER = "x-api-key"  # Anthropic's clients send their key in it
VERSION_HEADER = "anthropic-version"  # and this with every request
