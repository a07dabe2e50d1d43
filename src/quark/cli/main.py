"""The command group, and what becomes of errors.

A QuarkError is one line on stderr and exit status 1, its traceback only with --debug. A mistake in the command line is
status 2, as everywhere. Anything else is a bug, and shows its traceback.
"""

from __future__ import annotations

import click

from quark.cli.formats_command import formats
from quark.errors import QuarkError


class ErrorReportingGroup(click.Group):
    """Turns the errors that quark raises on purpose into a line."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except QuarkError as error:
            if ctx.params["debug"]:
                raise
            raise click.ClickException(" ".join(str(error).split())) from error


@click.group(cls=ErrorReportingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="quark-quantizer", prog_name="quark")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Quantize neural networks."""


main.add_command(formats)
