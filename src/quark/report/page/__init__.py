"""Self-contained HTML pages that open from disk.

    page_of     the accuracy report of a diagnosis, as text
    document    any other page with the same head, header, styles, tables and policy

`document.py` assembles pages from the .html, .css and .js files beside it. The content of a diagnosis is embedded as
JSON and shown as text nodes, so names are never interpreted as markup.
"""

from quark.report.page.document import document, page_of

__all__ = ["document", "page_of"]
