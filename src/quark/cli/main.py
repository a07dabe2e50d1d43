"""The `quark` command group.

A command's module is imported when the command runs or shows its help, so `quark --help` imports none of them.
"""

from __future__ import annotations

from importlib import import_module

import click

from quark.cli.errors import ErrorReportingGroup

# name -> module of quark.cli and first line of the help (60 characters at most), as `quark --help` lists them
GROUPS = {
    "Quantize": {
        "quantize": ("quantize_command", "Quantize the model IN and write it to OUT."),
        "search": ("search_command", "Try configurations, cheapest first, and rank them."),
        "quantize-torch": ("quantize_torch_command", "Quantize, train and export a torchvision network."),
        "quantize-llm": ("quantize_llm_command", "Quantize the language model in FOLDER into OUT."),
    },
    "Judge the result": {
        "report": ("report_command", "Write an HTML report on where accuracy was lost."),
        "compare": ("evaluate_commands", "Compare two models on the same samples."),
        "evaluate": ("evaluate_commands", "Measure the accuracy and speed of MODEL."),
        "debug": ("debug_command", "Find the first layer where two models diverge."),
        "lint": ("file_commands", "Check a quantized MODEL against the rules of AMD's NPU."),
        "inspect": ("file_commands", "Show the operators, parameters and formats of MODEL."),
    },
    "Work with files": {
        "pack": ("file_commands", "Store quantized weights at their true bit width."),
        "unpack": ("file_commands", "Restore the model that a packed file was made from."),
        "convert": ("convert_command", "Convert a model with one of many small tools."),
        "reproduce": ("file_commands", "Rebuild a quantized file from its card and compare."),
    },
    "Learn and check": {
        "demo": ("catalog_commands", "Quantize the bundled network with many presets."),
        "presets": ("catalog_commands", "List the presets, or print the preset NAME as YAML."),
        "formats": ("catalog_commands", "Compare number formats: size, limits, fidelity."),
        "doctor": ("doctor_command", "Check this installation and suggest fixes."),
    },
    "Example scripts of AMD's documents": {
        "prepare-data": ("example_scripts", "Sort ImageNet's images into class folders."),
        "advanced-quantize": ("example_scripts", "Quantize for an NPU; print size and accuracy."),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


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
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in group.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="quark-quantizer", prog_name="quark")
@click.option("--debug", is_flag=True, help="Show the log, and the traceback of an error.")
def main(debug: bool) -> None:
    """Quantize neural networks and measure the result.

    \b
    First steps:  quark quantize IN.onnx OUT.onnx --calib FOLDER
                  quark report OUT.onnx --float IN.onnx --calib FOLDER
    """
