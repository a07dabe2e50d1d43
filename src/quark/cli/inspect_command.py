"""`quark inspect`: what is inside a model file."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def inspect(model: Path, as_json: bool) -> None:
    """Show what MODEL holds: operators, parameters, and which tensors are quantized to what."""
    from quark.onnx.load.outline import read_outline
    from quark.report.inspection import inspect_model

    inspection = inspect_model(model, read_outline)
    if as_json:
        click.echo(json.dumps(inspection.to_json(), indent=2))
        return
    from rich.console import Console

    from quark.report.inspection_table import inspection_table

    Console(highlight=False).print(inspection_table(inspection))
