"""The table of extra options: name, what its value may be, what becomes of it, what it does."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quark.onnx.quantization.config.option_treatments import Option
from quark.onnx.quantization.config.options_of_graphs import GRAPH_OPTIONS
from quark.onnx.quantization.config.options_of_numbers import NUMBER_OPTIONS
from quark.onnx.quantization.config.options_of_runs import RUN_OPTIONS

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {row.name: row for row in (*NUMBER_OPTIONS, *GRAPH_OPTIONS, *RUN_OPTIONS)}
)
