"""Media types of the bodies that the router reads and writes."""

from __future__ import annotations

JSON_TYPE = "application/json"
EVENTS_TYPE = "text/event-stream"
HTML_TYPE = "text/html"
TEXT_TYPE = "text/plain"
FORM_TYPE = "multipart/form-data"
BYTES_TYPE = "application/octet-stream"
