"""`quark demo`: the embedded network through many presets, as a table."""

from __future__ import annotations

import sys

import click

from quark.cli.terminal import say, say_json


@click.command()
@click.argument("presets", metavar="[PRESET]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def demo(presets: tuple[str, ...], as_json: bool) -> None:
    """Quantize the bundled network with many presets.

    Uses a selection of presets, or those named, and shows the accuracy of each. Accuracy is measured on held-out
    digits from scikit-learn, which must be installed. Takes less than a minute.
    """
    from quark.demo.showcase import PRESETS, showcase, showcase_table
    from quark.report.console import Console

    chosen = presets or PRESETS
    rows = []
    for number, row in enumerate(showcase(chosen)):
        rows.append(row)
        # no bar: each quantization has its own, and two at once disturb each other
        if number < len(chosen) and sys.stderr.isatty():
            say(f"{number + 1} of {len(chosen)}: {chosen[number]}", err=True)
    if as_json:
        say_json({"rows": [row.to_json() for row in rows]})
    else:
        Console().print(showcase_table(rows))
