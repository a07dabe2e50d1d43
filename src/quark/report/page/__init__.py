"""A diagnosis as one HTML page that opens from a disk: everything is inside it, and nothing is fetched.

    page_of     the page, as text

`document.py` puts the page together; the .html, .css and .js files beside it are its parts. All that a diagnosis says
goes in as JSON and comes out as text nodes: a name can be anything, and is never markup.
"""

from quark.report.page.document import page_of

__all__ = ["page_of"]
