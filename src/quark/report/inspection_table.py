"""An Inspection for reading: one line for each fact, the long ones folded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quark.report.inspection import Inspection
from quark.report.quantities import count_of, listed, size_text

if TYPE_CHECKING:
    from quark.report.console import Table

MOST_OP_TYPES = 12
MOST_PORTS = 100  # inputs; as many outputs
MOST_METADATA = 8
MOST_CHARACTERS = 60  # of a value of the metadata, which may hold a whole configuration


def inspection_table(inspection: Inspection) -> Table:
    """Two columns without lines."""
    from quark.report.console import Table, cell

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _rows(inspection):
        grid.add_row(name, cell(value))
    return grid


def _rows(model: Inspection) -> Iterator[tuple[str, str]]:
    yield "file", f"{model.name}  {size_text(model.bytes)}"
    opsets = listed(f"{domain} {version}" for domain, version in model.opsets.items())
    yield "opset", f"{opsets} (IR version {model.ir_version})"
    if model.producer:
        yield "made by", model.producer
    yield from _numbered("input", model.inputs)
    yield from _numbered("output", model.outputs)
    counts = listed((f"{count} {name}" for name, count in model.nodes.items()), MOST_OP_TYPES)
    yield "nodes", f"{sum(model.nodes.values())}: {counts}"
    for index, each in enumerate(model.parameters):
        yield "" if index else "parameters", f"{count_of(each.count, 'value')} of {each.type}, {size_text(each.bytes)}"
    if model.functions:
        yield "functions", listed(model.functions)
    yield from _quantized_rows(model)
    yield from _metadata_rows(model)


def _numbered(heading: str, values: tuple[object, ...]) -> Iterator[tuple[str, str]]:
    for index, value in enumerate(values[:MOST_PORTS]):
        yield "" if index else heading, str(value)
    if len(values) > MOST_PORTS:
        yield "", f"and {len(values) - MOST_PORTS} more; --json shows all"


def _quantized_rows(model: Inspection) -> Iterator[tuple[str, str]]:
    if not model.is_quantized:
        yield "quantized", "nothing"
    for index, (role, formats) in enumerate(model.quantized.items()):
        what = listed((f"{count} {name}" for name, count in formats.items()), MOST_OP_TYPES)
        yield "" if index else "quantized", f"{role}: {what}"


def _metadata_rows(model: Inspection) -> Iterator[tuple[str, str]]:
    items = list(model.metadata.items())
    for index, (key, value) in enumerate(items[:MOST_METADATA]):
        text = " ".join(value.split())
        short = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
        yield "" if index else "metadata", f"{key}: {short}"
    if len(items) > MOST_METADATA:
        yield "", f"and {len(items) - MOST_METADATA} more; --json shows all"
