"""What runs in the pool now: snapshots for the live page and `baton top`, made while someone looks.

May import `requests`, `nodes`, `metrics` and `auth`.
"""
