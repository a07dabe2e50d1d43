"""The command group: one line for each command. What becomes of errors is in `quark.cli.errors`."""

from __future__ import annotations

import click

from quark.cli.advanced_command import advanced_quantize
from quark.cli.compare_command import compare
from quark.cli.debug_command import debug as debug_models
from quark.cli.demo_command import demo
from quark.cli.doctor_command import doctor
from quark.cli.errors import ErrorReportingGroup
from quark.cli.evaluate_command import evaluate
from quark.cli.formats_command import formats
from quark.cli.inspect_command import inspect
from quark.cli.lint_command import lint
from quark.cli.pack_command import pack
from quark.cli.prepare_data_command import prepare_data
from quark.cli.presets_command import presets
from quark.cli.quantize_command import quantize
from quark.cli.quantize_torch_command import quantize_torch
from quark.cli.report_command import report
from quark.cli.reproduce_command import reproduce
from quark.cli.search_command import search
from quark.cli.unpack_command import unpack


@click.group(cls=ErrorReportingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="quark-quantizer", prog_name="quark")
@click.option("--debug", is_flag=True, help="Show the log, and the traceback of an error.")
def main(debug: bool) -> None:
    """Quantize neural networks and measure the result."""


main.add_command(quantize)
main.add_command(quantize_torch)
main.add_command(evaluate)
main.add_command(compare)
main.add_command(report)
main.add_command(debug_models)
main.add_command(search)
main.add_command(reproduce)
main.add_command(pack)
main.add_command(unpack)
main.add_command(inspect)
main.add_command(lint)
main.add_command(presets)
main.add_command(formats)
main.add_command(prepare_data)
main.add_command(advanced_quantize)
main.add_command(doctor)
main.add_command(demo)
