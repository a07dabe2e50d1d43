"""`quark presets`: the configs that have a name."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command()
@click.argument("name", required=False)
@click.option("--all", "has_all_fields", is_flag=True, help="With NAME: every field, also those at their default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def presets(name: str | None, has_all_fields: bool, as_json: bool) -> None:
    """List the presets, or show the config called NAME as YAML.

    That YAML in a file is what --config FILE.yaml takes.
    """
    from quark.onnx.quantization.presets import PRESETS, get_default_config

    if name is not None:
        content = _fields(get_default_config(name), has_all_fields)
        click.echo(json.dumps(content, indent=2) if as_json else _yaml(name, content), nl=as_json)
    elif as_json:
        click.echo(json.dumps({"presets": {each.name: each.description for each in PRESETS.values()}}, indent=2))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("preset", no_wrap=True)
        table.add_column("numbers, ranges and purpose")
        for each in PRESETS.values():
            table.add_row(each.name, each.description)
        Console(highlight=False).print(table)


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
