"""`baton up`: runs the parts of a pool as child processes on one machine."""
