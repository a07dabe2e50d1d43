"""`quark inspect`: what is inside a model file."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.terminal import say_json


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def inspect(model: Path, as_json: bool) -> None:
    """Show the operators, parameters and formats of MODEL.

    The formats are those of the quantized tensors.
    """
    from quark.onnx.load.outline import read_proto
    from quark.report.inspection import inspect_model

    inspection = inspect_model(model, read_proto)
    if as_json:
        say_json(inspection.to_json())
        return
    from quark.report.console import Console
    from quark.report.inspection_table import inspection_table

    Console().print(inspection_table(inspection))
