"""`quark reproduce`: make a quantized file again from its card, and compare the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.terminal import say, say_json

if TYPE_CHECKING:
    from quark.onnx.quantization.reproduction import Reproduction

DIFFERENT = 3


@click.command()
@click.argument("card", type=click.Path(path_type=Path))
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="FLOAT",
    help="The float model (default: at the path in the card, or next to the card).",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE.npz",
    help="The calibration data (default: at the path in the card, or next to the card).",
)
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="OUT", help="Write the file here (default: only compare it)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def reproduce(card: Path, model: Path | None, calib: Path | None, output: Path | None, as_json: bool) -> None:
    """Rebuild a quantized file from its card and compare.

    CARD is MODEL.json, or the quantized MODEL.onnx itself.

    \b
    Exit status: 0 the bytes are the same
                 1 an error: the float model or the data is not the
                   card's, or the file cannot be made from a card
                 2 invalid command line
                 3 the bytes differ; the differences are listed
    """
    from quark.onnx.quantization.reproduction import reproduce as make_again

    result = make_again(card, model, calib, output)
    if as_json:
        say_json(result.to_dict(), indent=1)
    else:
        _show(result, output)
    if not result.is_same:
        raise SystemExit(DIFFERENT)


def _show(result: Reproduction, output: Path | None) -> None:
    for each in result.warnings:
        say(f"not as it was: {each}")
    if result.is_same:
        say(f"same bytes: {result.found.bytes:,} with SHA-256 {result.expected}")
    else:
        say(f"different: SHA-256 {result.found.sha256}, expected {result.expected}")
        for each in result.differences:
            say(f"  {each}")
    if output is not None:
        say(f"written: {output}, {output.with_suffix('.json')}")
