"""`quark demo`: the embedded network through many presets, as a table."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.argument("presets", metavar="[PRESET]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def demo(presets: tuple[str, ...], as_json: bool) -> None:
    """Quantize the network that comes with quark, with many presets or those named, and show what each keeps.

    Accuracy is counted on held-out digits of scikit-learn, which must be installed. Takes under a minute.
    """
    from rich.console import Console

    from quark.demo.showcase import PRESETS, showcase, showcase_table

    chosen = presets or PRESETS
    rows = []
    for number, row in enumerate(showcase(chosen)):
        rows.append(row)
        # no bar: each quantization has its own, and two at once disturb each other
        if number < len(chosen) and sys.stderr.isatty():
            click.echo(f"{number + 1} of {len(chosen)}: {chosen[number]}", err=True)
    if as_json:
        click.echo(json.dumps({"rows": [row.to_json() for row in rows]}, indent=2))
    else:
        Console(highlight=False).print(showcase_table(rows))
