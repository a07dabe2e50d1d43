"""The two files: read, told apart, and checked to be of one network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from quark.account import FileFacts
from quark.errors import InvalidValueError
from quark.files.foreign import parse_json
from quark.onnx.diagnose.operands import is_quantizing
from quark.onnx.input_files import MappedFile
from quark.onnx.lint.read_graph import graph_of
from quark.onnx.load.external_data import ExternalData
from quark.onnx.load.source import read_source
from quark.onnx.load.structure import check_ports
from quark.onnx.load.wire import carve

ModelFile: TypeAlias = str | os.PathLike[str] | onnx.ModelProto

CONFIG_KEY = "quark.config"  # of the metadata of files from here


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two models; `path` is None for one that came without a file."""

    model: ir.Model
    facts: FileFacts
    path: Path | None
    files: tuple[MappedFile, ...] = ()  # that weights are still read from

    @property
    def is_quantized(self) -> bool:
        return any(is_quantizing(node) for node in self.model.graph)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that the file says it was made by; empty where it does not."""
        try:
            content = parse_json(self.model.metadata_props.get(CONFIG_KEY, "{}"), CONFIG_KEY)
        except InvalidValueError:
            return {}  # it only helps to word the advice
        is_config = isinstance(content, dict) and isinstance(content.get("extra_options", {}), dict)
        return content if is_config else {}


def read_side(source: ModelFile) -> Side:
    """What is no ONNX model is a ModelError."""
    read = read_source(source)
    external = ExternalData(read)
    check_ports(carve(read).proto, read.name)
    model = graph_of(read, external)
    facts = FileFacts(read.name, len(read.data) + external.bytes, external.digest().hexdigest())
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    model.graph.sort()  # other tools leave that to the runtime
    return Side(model, facts, path, external.mapped)


def check_pair(exact: Side, quantized: Side) -> None:
    """That they are a float model and its quantized form, in that order, with the same inputs and outputs."""
    if exact.is_quantized and not quantized.is_quantized:
        raise InvalidValueError(
            f"'{exact.facts.name}' is quantized and '{quantized.facts.name}' is not: give the float model first"
        )
    if exact.is_quantized:
        raise InvalidValueError(f"'{exact.facts.name}' is quantized: expected the float model that it was made from")
    for kind in ("inputs", "outputs"):
        names = [_names(side.model, kind) for side in (exact, quantized)]
        if set(names[0]) != set(names[1]):
            raise InvalidValueError(
                f"the {kind} differ: '{exact.facts.name}' has {_listed(names[0])}, '{quantized.facts.name}' has "
                f"{_listed(names[1])}. Give two forms of one network"
            )


def _names(model: ir.Model, kind: str) -> list[str]:
    values = model.graph.inputs if kind == "inputs" else model.graph.outputs
    return [str(value.name) for value in values if value.name not in model.graph.initializers]


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
