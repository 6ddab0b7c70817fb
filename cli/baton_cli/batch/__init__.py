"""`baton run-batch`: a file of requests, sent to a server, and the file of their answers."""
