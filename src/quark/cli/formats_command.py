"""`quark formats`: what each number format costs, and what it keeps of real weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.terminal import say_json

if TYPE_CHECKING:
    import onnx_ir


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--weights",
    "weights_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure on the weights in this .onnx model or .npz archive instead of the demo network's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--all", "all_widths", is_flag=True, help="Include every integer width.")
def formats(names: tuple[str, ...], weights_file: Path | None, as_json: bool, all_widths: bool) -> None:
    """Compare number formats: size, limits, fidelity.

    Name formats to show only those. Fidelity is measured on real weights.
    """
    from quark.demo import network_path
    from quark.formats import get_format
    from quark.report.console import Console
    from quark.report.formats_table import chosen_formats, format_rows, rich_table
    from quark.report.weights import read_weights

    chosen = [get_format(name) for name in names] or chosen_formats(all_widths)
    path = weights_file or network_path()
    weights = read_weights(path, _read_demo if weights_file is None else _read_model)
    rows = format_rows(chosen, weights)
    if as_json:
        content = {"weights": path.name, "formats": [row.to_json() for row in rows]}
        say_json(content)
    else:
        Console().print(rich_table(rows, weights, path.name))


def _read_demo(path: Path) -> onnx_ir.Model:
    """The demo network of this package, without what needs ONNX Runtime."""
    import onnx_ir

    return onnx_ir.load(path)


def _read_model(path: Path) -> onnx_ir.Model:
    from quark.onnx.load.outline import read_whole

    return read_whole(path)
