"""The description of a feature for the configuration, the pipelines and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Feature:
    """A feature. `folder` is its name; `nouns` says what the report counts, by the name that the feature has there.

    With a `switch`, the extra option of that name turns it on, and `doc` describes it in docs/options.md. `options` is
    the dataclass of its settings; fields made by `setting` are extra options as well. Features without a switch are
    configured by fields and options of their own. `data_use` says what a feature of the ONNX road computes from
    calibration data, if it cannot do without and random numbers are no substitute. `trains` is True for training, which
    takes long and starts from the result of all other features; it runs only on the network that is written.
    """

    folder: str
    switch: str = ""
    doc: str = ""
    options: Any = None
    nouns: Mapping[str, str] = field(default_factory=dict)
    data_use: str = ""
    trains: bool = False

    def settings(self) -> dict[str, tuple[str, Any, str]]:
        """The extra options of its settings: field, default and description."""
        rows = [field for field in fields(self.options) if "option" in field.metadata] if self.switch else []
        return {row.metadata["option"]: (row.name, row.default, row.metadata["doc"]) for row in rows}


def setting(option: str, default: Any, doc: str) -> Any:
    """A field of a feature's options that the extra option `option` sets."""
    return field(default=default, metadata={"option": option, "doc": doc})
