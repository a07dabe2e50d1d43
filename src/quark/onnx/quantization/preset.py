"""What a preset is: a name, what it is for, and the fields of its QuantizationConfig."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quark.onnx.quantization.config.config import QuantizationConfig


@dataclass(frozen=True)
class Algorithm:
    """An accuracy algorithm as presets name it: the flag and the extra option that ask for it."""

    name: str
    suffix: str
    flag: str
    option: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Preset:
    """A row."""

    name: str
    description: str
    fields: Mapping[str, Any]
    options: Mapping[str, Any]

    def config(self) -> QuantizationConfig:
        """A fresh config; nothing in it is shared."""
        return QuantizationConfig(**copy.deepcopy(dict(self.fields)), extra_options=copy.deepcopy(dict(self.options)))

    def with_fields(self, **fields: Any) -> Preset:
        """This preset with these fields, too."""
        return replace(self, fields={**self.fields, **fields})

    def with_options(self, **options: Any) -> Preset:
        """This preset with these extra options, too."""
        return replace(self, options={**self.options, **options})

    def with_algorithm(self, algorithm: Algorithm) -> Preset:
        """This preset followed by an accuracy algorithm."""
        return replace(
            self,
            name=self.name + algorithm.suffix,
            description=f"{self.description}, refined by {algorithm.name}",
            fields={**self.fields, algorithm.flag: True},
            options={**self.options, algorithm.option: dict(algorithm.parameters)},
        )
