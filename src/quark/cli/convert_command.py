"""`quark convert`: the tools of quark.onnx.tools, by names with dashes and without `convert_`."""

from __future__ import annotations

import logging
from importlib import import_module
from textwrap import wrap
from typing import TYPE_CHECKING

import click

from quark.cli.terminal import say
from quark.errors import unknown_name
from quark.onnx.tools import TOOLS
from quark.report.console import Console, plain_table

if TYPE_CHECKING:
    from quark.onnx.tools.command import Tool

_WIDTH = 74  # line width of the help


def short_name(module: str) -> str:
    """The name of a tool on the command line.

    >>> short_name("convert_fp32_to_bf16"), short_name("fix_shapes")
    ('fp32-to-bf16', 'fix-shapes')
    """
    return module.removeprefix("convert_").replace("_", "-")


NAMES = {short_name(module): module for modules in TOOLS.values() for module in modules}


def _names_by_purpose() -> str:
    paragraphs = []
    for purpose, modules in TOOLS.items():
        names = wrap(", ".join(map(short_name, modules)), _WIDTH, break_on_hyphens=False)
        paragraphs.append("\n".join(["\b", f"{purpose}:", *(f"  {line}" for line in names)]))
    return "\n\n".join(paragraphs)


HELP = f"""Convert a model with one of many small tools.

Without NAME, list the tools. `quark convert NAME --help` shows the arguments of a tool. The same tools can be run by
`python -m quark.onnx.tools.NAME`, under AMD's names.

{_names_by_purpose()}
"""


@click.command(help=HELP, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--for",
    "target",
    type=click.Choice(["cpu"]),
    help="Prepare a model for this target without changing a bit of its outputs: the tool for-cpu.",
)
@click.argument("name", required=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
@click.pass_context
def convert(ctx: click.Context, target: str | None, name: str | None, words: tuple[str, ...]) -> None:
    """Run the tool, or list all of them."""
    if target is not None:
        name, words = f"for-{target}", words if name is None else (name, *words)
    if name is None:
        _list_tools()
        return
    key = short_name(name.replace("-", "_"))
    if key not in NAMES:
        raise unknown_name("tool", name, NAMES)
    if "--debug" in words:
        ctx.find_root().meta["quark.debug"] = True
    tool = _tool(NAMES[key])
    args = tool.parse_args([word for word in words if word != "--debug"], f"quark convert {key}")
    logger, remarks = logging.getLogger("quark"), logging.StreamHandler()
    remarks.setLevel(logging.WARNING)
    logger.addHandler(remarks)
    try:
        tool.work(args)
    finally:
        logger.removeHandler(remarks)


def _tool(module: str) -> Tool:
    tool: Tool = import_module(f"quark.onnx.tools.{module}").TOOL
    return tool


def _list_tools() -> None:
    for purpose, modules in TOOLS.items():
        table = plain_table()
        table.add_column(purpose, no_wrap=True, min_width=max(map(len, NAMES)))
        table.add_column("")
        for module in modules:
            table.add_row(short_name(module), _tool(module).summary)
        Console().print(table)
        say()
    say("'quark convert NAME --help' shows the arguments of a tool.")
