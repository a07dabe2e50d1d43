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
    """Restore the model that a packed file was made from.

    Reads the packed MODEL and writes OUTPUT, with every weight as float, byte for byte as it was.
    """
    from quark.onnx.pack import unpack_model

    facts = unpack_model(model, output)
    if as_json:
        say_json(facts.to_json())
        return
    from quark.report.quantities import count_of, size_text

    sizes = f"{size_text(facts.bytes_before)} -> {size_text(facts.bytes_after)}"
    say(f"{output}  {sizes}, {count_of(len(facts.weights), 'weight')} unpacked")
