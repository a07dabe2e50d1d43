"""Documents that are written from the code: the API, the commands, and what is supported where.

Each module makes the text of one document; `python -m tools.reference` writes them all.
"""
