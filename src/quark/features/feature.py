"""What the configuration, the pipelines and the report know of a feature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Feature:
    """`folder` is its name. `nouns` says what the report counts, by the name that the feature has there.

    With a `switch`, the extra option of that name turns it on, and `doc` says in docs/options.md what that does.
    `options` is the dataclass of its settings, of which fields made by `setting` are extra options as well. Features
    without a switch have fields and options of their own in the configuration. `data_use` says what a feature of the
    ONNX road computes from calibration data, if it cannot run without, and random numbers cannot take its place.
    `trains` is True if it trains what all others leave, which takes long: only of the network that is written.
    """

    folder: str
    switch: str = ""
    doc: str = ""
    options: Any = None
    nouns: Mapping[str, str] = field(default_factory=dict)
    data_use: str = ""
    trains: bool = False

    def settings(self) -> dict[str, tuple[str, Any, str]]:
        """The extra options of its settings: the field, its default, and what it does."""
        rows = [field for field in fields(self.options) if "option" in field.metadata] if self.switch else []
        return {row.metadata["option"]: (row.name, row.default, row.metadata["doc"]) for row in rows}


def setting(option: str, default: Any, doc: str) -> Any:
    """A field of a feature's options that the extra option `option` sets."""
    return field(default=default, metadata={"option": option, "doc": doc})
