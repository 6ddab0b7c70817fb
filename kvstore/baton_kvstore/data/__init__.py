"""The data plane: puts and gets of chunks on the data servers."""
