"""What the code can say: every string literal of the package, with "…" in the place of what is formatted into it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import quark

ANYTHING = "…"


@cache
def source_texts() -> tuple[str, ...]:
    """Each once. Literals next to each other are one text, as Python has it."""
    files = sorted(Path(quark.__file__).parent.rglob("*.py"))
    texts = (text for file in files for text in _texts(ast.parse(file.read_text(encoding="utf-8"))))
    return tuple(dict.fromkeys(" ".join(text.split()) for text in texts))


def is_said(template: str, texts: tuple[str, ...] | None = None) -> bool:
    """Whether the constant words of a template stand in one text, in their order. "…" in the template is anything; so
    are quotes beside it, which formatting may have added."""
    words = [part.strip(" '") for part in template.split(ANYTHING)]
    return any(_has(text, words) for text in (source_texts() if texts is None else texts))


def _has(text, words):
    start = 0
    for word in words:
        found = text.find(word, start)
        if found < 0:
            return False
        start = found + len(word)
    return True


def _texts(tree):
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value
