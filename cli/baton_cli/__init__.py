"""The `baton` command; composes the rooms.

In: the command line and BATON_* variables. Out: a running pool, one role, or an offline answer.

    main         the command tree, and errors turned into one line and an exit code
    options      one frozen record per command: its flags, defaults and units
    flags        records <-> argparse <-> argv
    environment  the only reader of the process environment
    up           from UpOptions to a plan: checks, shares of the cores, what each child is told
    supervisor   runs the plan: children, restarts, live table, shutdown
    roles        one role in this process: prefill, decode, router
"""
