"""The data plane: chunks in and out of the data servers."""
