"""The `quark` command group.

A command's module is imported when the command runs or shows its help, so `quark --help` imports none of them.
"""

from __future__ import annotations

from importlib import import_module

import click

from quark.cli.errors import ErrorReportingGroup

# name -> module of quark.cli and first line of the help, in the order in which `quark --help` lists them
COMMANDS = {
    "quantize": ("quantize_command", "Quantize the model IN and write it to OUT."),
    "quantize-torch": ("quantize_torch_command", "Quantize, train and export a torchvision network."),
    "quantize-llm": ("quantize_llm_command", "Quantize the language model in FOLDER and write it to OUT."),
    "evaluate": ("evaluate_commands", "Measure the accuracy and speed of MODEL."),
    "compare": ("evaluate_commands", "Compare two models on the same samples."),
    "report": ("report_command", "Write an HTML report on where accuracy was lost."),
    "debug": ("debug_command", "Find the first layer where two models diverge."),
    "search": ("search_command", "Try configurations, cheapest first, and rank them."),
    "reproduce": ("file_commands", "Rebuild a quantized file from its card and compare."),
    "pack": ("file_commands", "Store quantized weights at their true bit width."),
    "unpack": ("file_commands", "Restore the model that a packed file was made from."),
    "convert": ("convert_command", "Convert a model with one of many small tools."),
    "inspect": ("file_commands", "Show the operators, parameters and formats of MODEL."),
    "lint": ("file_commands", "Check a quantized MODEL against the rules of AMD's NPU."),
    "presets": ("catalog_commands", "List the presets, or print the preset NAME as YAML."),
    "formats": ("catalog_commands", "Compare number formats: size, limits, fidelity."),
    "prepare-data": ("example_scripts", "Sort ImageNet's images into class folders."),
    "advanced-quantize": ("example_scripts", "Quantize for an NPU; print size and accuracy."),
    "doctor": ("doctor_command", "Check this installation and suggest fixes."),
    "demo": ("catalog_commands", "Quantize the bundled network with many presets."),
}


class LazyGroup(ErrorReportingGroup):
    """The commands of COMMANDS, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            module = import_module(f"quark.cli.{COMMANDS[cmd_name][0]}")
            self.add_command(getattr(module, cmd_name.replace("-", "_")))
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="quark-quantizer", prog_name="quark")
@click.option("--debug", is_flag=True, help="Show the log, and the traceback of an error.")
def main(debug: bool) -> None:
    """Quantize neural networks and measure the result."""
