"""The elements of an HTML page, and whether it needs anything from elsewhere."""

import base64
import hashlib
import re
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br"}


class Outline(HTMLParser):
    """Elements by name with their attributes, the text of scripts and styles, and whether each end has its start."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.raw = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] in ("script", "style"):
            tag, attributes = self.open[-1]
            self.raw.setdefault(attributes.get("id", tag), []).append(data)

    def text_of(self, name):
        return "".join(self.raw[name])


def check_self_contained(page):
    """The policy allows the page's own script and style, and no connection."""
    outline = Outline(page)
    policy = next(
        element["content"]
        for tag, element in outline.elements
        if element.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        digest = hashlib.sha256(outline.text_of(kind).encode()).digest()
        assert f"{kind}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert not [element for _, element in outline.elements if "src" in element or "style" in element]
    assert not re.findall(r"""(?:href|url|import)[=(\s]+['"]?(?:https?:)?//""", page)
