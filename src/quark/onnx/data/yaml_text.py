"""YAML as people write configs and preprocessing in it."""

from __future__ import annotations

from typing import Any

from quark.errors import InvalidValueError

MOST_DEPTH = 50  # of brackets: PyYAML's time grows with the square of it, and its recursion ends at some hundreds


def parse_yaml(text: str) -> Any:
    """The content. Text that is no YAML is PyYAML's YAMLError, text of brackets in brackets an InvalidValueError."""
    import yaml

    depth = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if depth > MOST_DEPTH:
            raise InvalidValueError(f"brackets within brackets, more than {MOST_DEPTH} deep; expected a few fields")
    return yaml.safe_load(text)
