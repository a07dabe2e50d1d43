"""`quark presets`: the configs that have a name."""

from __future__ import annotations

from typing import Any

import click

from quark.cli.terminal import say_json, say_lines


@click.command()
@click.argument("name", required=False)
@click.option("--all", "has_all_fields", is_flag=True, help="With NAME: include fields that have their default value.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table or YAML.")
def presets(name: str | None, has_all_fields: bool, as_json: bool) -> None:
    """List the presets, or print the preset NAME as YAML.

    Save the YAML to a file to use it as --config FILE.yaml.
    """
    from quark.onnx.quantization.presets import PRESETS, get_default_config

    if name is not None:
        content = _fields(get_default_config(name), has_all_fields)
        if as_json:
            say_json(content)
        else:
            say_lines(_yaml(name, content))
    elif as_json:
        say_json({"presets": {each.name: each.description for each in PRESETS.values()}})
    else:
        from quark.report.console import Console, plain_table

        table = plain_table()
        table.add_column("preset", no_wrap=True)
        table.add_column("numbers, ranges and purpose")
        for each in PRESETS.values():
            table.add_row(each.name, each.description)
        Console().print(table)


def _fields(config: Any, has_all_fields: bool) -> dict[str, Any]:
    """The config's content; without what a fresh one has too, unless all is asked for."""
    from quark.onnx.quantization.config.config import QuantizationConfig

    content: dict[str, Any] = config.to_dict()
    plain = QuantizationConfig().to_dict()
    return {key: value for key, value in content.items() if has_all_fields or value != plain[key]}


def _yaml(name: str, content: dict[str, Any]) -> str:
    import yaml

    from quark.onnx.quantization.presets import PRESETS

    heading = f"# {name}: {PRESETS[name].description}\n"
    return heading + (yaml.safe_dump(content, sort_keys=False) if content else "{}\n")
