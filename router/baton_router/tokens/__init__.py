"""Dialects that read tokens instead of text: ids in and ids out, and scores of labels."""
