"""The `baton` command, which puts the other packages together.

In: the command line and BATON_* variables. Out: a running pool, one role, or an offline answer.

    main        the command tree; turns an error into one line and an exit code
    commands    one module per command
    terminal    what chat, top and explain show on a terminal
    completion  scripts with which shells complete the command line
    kubectl     `kubectl baton`
    local_pool  `baton up`: supervises the parts of a pool as child processes
    bench       `baton bench`: load on an engine or a server, and the measured figures
    models      models on this machine: folders, the Hugging Face hub, the demo model
    options     one frozen record per command: flags, defaults, units, environment variables
    otlp        sends spans with OpenTelemetry's exporter
    logs        logging setup
    errors      the errors that a command raises
"""
