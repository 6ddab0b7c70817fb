"""The live page: files for a browser in `assets/`, and the table of them that the router serves.

Imports nothing of the router. The page reads what the API's routes answer.
"""
