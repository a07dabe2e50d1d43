"""`quark unpack`: a packed file as it was."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.terminal import say, say_json


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON.")
def unpack(model: Path, output: Path, as_json: bool) -> None:
    """Write the model that the packed MODEL was made from, as OUTPUT: every weight float, byte by byte as it was."""
    from quark.onnx.pack import unpack_model

    facts = unpack_model(model, output)
    if as_json:
        say_json(facts.to_json())
        return
    from quark.report.quantities import count_of, size_text

    sizes = f"{size_text(facts.bytes_before)} -> {size_text(facts.bytes_after)}"
    say(f"{output}  {sizes}, {count_of(len(facts.weights), 'weight')} unpacked")
