"""Commands that show what quark offers: presets, formats, demo.

`formats` works without ONNX Runtime, so the others import what needs it late.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml

from quark.cli.options import PATH, json_option
from quark.cli.terminal import say, say_json, say_lines
from quark.demo import network_path
from quark.formats import get_format
from quark.report.console import Console, plain_table
from quark.report.formats_table import chosen_formats, format_rows, read_weights, rich_table

if TYPE_CHECKING:
    import onnx_ir


@click.command()
@click.argument("name", required=False)
@click.option("--all", "has_all_fields", is_flag=True, help="With NAME: include fields that have their default value.")
@json_option("Print JSON instead of a table or YAML.")
def presets(name: str | None, has_all_fields: bool, as_json: bool) -> None:
    """List the presets, or print the preset NAME as YAML.

    Save the YAML to a file to use it as --config FILE.yaml.
    """
    from quark.onnx.quantization.config.config import QuantizationConfig, get_default_config
    from quark.onnx.quantization.presets import PRESETS

    if name is not None:
        content = get_default_config(name).to_dict()
        if not has_all_fields:
            default = QuantizationConfig().to_dict()
            content = {key: value for key, value in content.items() if value != default[key]}
        if as_json:
            say_json(content)
        else:
            heading = f"# {name}: {PRESETS[name].description}\n"
            say_lines(heading + (yaml.safe_dump(content, sort_keys=False) if content else "{}\n"))
    elif as_json:
        say_json({"presets": {preset.name: preset.description for preset in PRESETS.values()}})
    else:
        table = plain_table()
        table.add_column("preset", no_wrap=True)
        table.add_column("numbers, ranges and purpose")
        for preset in PRESETS.values():
            table.add_row(preset.name, preset.description)
        Console().print(table)


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--weights",
    "weights_file",
    type=PATH,
    metavar="FILE",
    help="Measure on the weights in this .onnx model or .npz archive instead of the demo network's.",
)
@json_option("Print JSON instead of a table.")
@click.option("--all", "all_widths", is_flag=True, help="Include every integer width.")
def formats(names: tuple[str, ...], weights_file: Path | None, as_json: bool, all_widths: bool) -> None:
    """Compare number formats: size, limits, fidelity.

    Name formats to show only those. Fidelity is measured on real weights.
    """

    def read(path: Path) -> onnx_ir.Model:
        if weights_file is None:  # the demo network, which can be read without ONNX Runtime
            import onnx_ir

            return onnx_ir.load(path)
        from quark.onnx.load.reading import read_whole

        return read_whole(path)

    chosen = [get_format(name) for name in names] or chosen_formats(all_widths)
    path = weights_file or network_path()
    weights = read_weights(path, read)
    rows = format_rows(chosen, weights)
    if as_json:
        say_json({"weights": path.name, "formats": [row.to_json() for row in rows]})
    else:
        Console().print(rich_table(rows, weights, path.name))


@click.command()
@click.argument("presets", metavar="[PRESET]...", nargs=-1)
@json_option("Print JSON instead of a table.")
def demo(presets: tuple[str, ...], as_json: bool) -> None:
    """Quantize the bundled network with many presets.

    Uses a selection of presets, or those named, and shows the accuracy, the size and the use of each. Accuracy is
    measured on held-out digits that come with the package. Takes less than a minute.
    """
    from quark.demo.showcase import PRESETS, showcase, showcase_table, uses_table
    from quark.onnx import get_default_config

    chosen = presets or PRESETS
    for name in chosen:
        get_default_config(name)  # reject unknown names before the work starts
    rows = []
    for number, row in enumerate(showcase(chosen)):
        rows.append(row)
        # lines instead of a progress bar, because each quantization shows its own bar
        if number < len(chosen) and not as_json:
            say(f"{number + 1} of {len(chosen)}: {chosen[number]}", err=True)
    if as_json:
        say_json({"rows": [row.to_json() for row in rows]})
    else:
        console = Console()
        console.print(showcase_table(rows))
        console.print()
        console.print(uses_table(chosen))
