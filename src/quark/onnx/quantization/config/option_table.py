"""The table of extra options: name, what its value may be, what becomes of it, what it does."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quark.onnx.quantization.config.option_treatments import Option
from quark.onnx.quantization.config.options_of_algorithms import ALGORITHM_OPTIONS
from quark.onnx.quantization.config.options_of_graphs import GRAPH_OPTIONS
from quark.onnx.quantization.config.options_of_npus import NPU_OPTIONS
from quark.onnx.quantization.config.options_of_numbers import NUMBER_OPTIONS
from quark.onnx.quantization.config.options_of_runs import RUN_OPTIONS

SECTIONS: Mapping[str, tuple[Option, ...]] = MappingProxyType(
    {
        "Numbers, scales and ranges": NUMBER_OPTIONS,
        "What is quantized, and how the graph is written": GRAPH_OPTIONS,
        "Accuracy algorithms": ALGORITHM_OPTIONS,
        "NPUs": NPU_OPTIONS,
        "The run": RUN_OPTIONS,
    }
)
OPTIONS: Mapping[str, Option] = MappingProxyType({row.name: row for rows in SECTIONS.values() for row in rows})
