"""What `baton chat`, `baton top` and `baton explain` show on a terminal, and how they ask a router.

remote_router    requests to a router, and streams of events
text             texts of others, shown without their control characters; tables
explain_text     an explanation of a request, as lines
conversation     the turns of a chat, and one answer as it arrives
chat_session     a chat on a terminal: input, answers, slash commands
pool_lines       a snapshot of a pool, as lines
pool_feed        the newest snapshot, read in a thread
pool_screen      these lines on a whole screen, with keys
"""
