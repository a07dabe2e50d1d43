"""HTML pages that open from a disk: everything is inside them, and nothing is fetched.

    page_of     the accuracy report of a diagnosis, as text
    document    any other page with the same head, header, styles, tables and policy

`document.py` puts pages together; the .html, .css and .js files beside it are their parts. All that a diagnosis says
goes in as JSON and comes out as text nodes: a name can be anything, and is never markup.
"""

from quark.report.page.document import document, page_of

__all__ = ["document", "page_of"]
