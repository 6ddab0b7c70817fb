"""The `baton` command; composes the rooms.

In: the command line and BATON_* variables. Out: a running pool, one role, or an offline answer.

    main        the command tree, and errors turned into one line and an exit code
    commands    one module per command
    local_pool  `baton up`: the parts of a pool as child processes, supervised
    bench       `baton bench`: load on an engine or on a server, and its figures
    models      models on this machine: folders, the Hugging Face hub, the demo model
    options     one frozen record per command: flags, defaults, units, environment variables
    otlp        spans, sent by OpenTelemetry's exporter
    logs        log lines
    errors      what a command raises
"""
