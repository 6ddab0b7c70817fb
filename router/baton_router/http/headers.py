"""Names of the headers by which clients and this router speak of one request."""

from __future__ import annotations

PLACEMENT_HEADER = "x-baton-placement"
EXACT_HEADER = "x-baton-exact"
POLICY_HEADER = "x-baton-policy"
RESUME_HEADER = "x-baton-resume"
LAST_EVENT_HEADER = "Last-Event-ID"
OWN_ID_HEADER = "x-baton-request-id"
ID_HEADER = "x-request-id"  # the client's own id of the request, or the router's
