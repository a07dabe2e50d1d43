"""Documents that are written from the code: the API, the commands, and what is supported where.

Each module makes the text of one document; `python -m quark.cli.reference` writes them all. They live right of
everything else, since they look at both roads.
"""
