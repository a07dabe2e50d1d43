"""`quark pack`: weights in the bits that their formats say."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.terminal import say_json

if TYPE_CHECKING:
    from quark.onnx.pack import LeftWeight, PackedWeight, PackFacts
    from quark.report.console import Table

PROFILES = ("portable", "custom", "native")
MOST_LEFT = 5  # reasons that the table names weights for


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default="portable",
    show_default=True,
    help="portable: standard operators, runs anywhere. custom: the same, as calls of a function in the file. native: "
    "ONNX's own small types, for runtimes that support them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON instead of tables.")
def pack(model: Path, output: Path, profile: str, as_json: bool) -> None:
    """Store quantized weights at their true bit width.

    Reads the quantized MODEL and writes OUTPUT. The network's outputs stay bit-identical, and it runs as fast: ONNX
    Runtime unpacks the weights when the session is created. 'quark unpack' restores the model.
    """
    from quark.onnx.pack import pack_model

    facts = pack_model(model, output, profile)
    if as_json:
        say_json(facts.to_json())
        return
    from quark.report.console import Console, cell
    from quark.report.quantities import size_text

    console = Console()
    sizes = f"{size_text(facts.bytes_before)} -> {size_text(facts.bytes_after)}"
    console.print(cell(f"{output}  {sizes}, {facts.bits_per_weight:.2f} bits per packed weight"))
    console.print(_packed_table(facts))
    if facts.left:
        console.print(_left_table(facts))
    for remark in facts.remarks:
        console.print(cell(remark))


def _packed_table(facts: PackFacts) -> Table:
    from quark.report.console import cell
    from quark.report.quantities import size_text

    table = _table("packed as", "weights", "bits", "before", "after")
    groups: dict[tuple[str, str], list[PackedWeight]] = defaultdict(list)
    for each in facts.packed:
        groups[each.format, each.note].append(each)
    for (name, note), weights in groups.items():
        before, after = sum(each.bytes_before for each in weights), sum(each.bytes_after for each in weights)
        count = sum(each.bytes_after * 8 / each.bits for each in weights)
        cells = [str(len(weights)), f"{after * 8 / count:.2f}", size_text(before), size_text(after)]
        table.add_row(cell(f"{name} ({note})" if note else name), *cells)
    return table


def _left_table(facts: PackFacts) -> Table:
    from quark.report.console import cell
    from quark.report.quantities import listed, size_text

    table = _table("left as it was", "weights", "size")
    groups: dict[str, list[LeftWeight]] = defaultdict(list)
    for each in facts.left:
        groups[each.reason].append(each)
    for reason, weights in groups.items():
        names = listed((each.name for each in weights), MOST_LEFT)
        size = size_text(sum(each.bytes for each in weights))
        table.add_row(cell(f"{reason}: {names}"), str(len(weights)), size)
    return table


def _table(first: str, *others: str) -> Table:
    from quark.report.console import plain_table

    table = plain_table()
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
