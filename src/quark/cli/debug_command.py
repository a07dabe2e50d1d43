"""`quark debug`: the first layer where a quantized model diverges from the float one."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.options import (
    COUNT,
    DATA_PATHS,
    PATH,
    Calibration,
    json_option,
    preprocess_option,
    random_option,
)
from quark.cli.report_command import TRY_HELP, suggestion_lines, with_suggestions
from quark.cli.terminal import say_json
from quark.compare import Verdict
from quark.diagnosis import Diagnosis, Outcome
from quark.inspect.diagnose import diagnose, first_divergence
from quark.report.console import Console, Table, cell, plain_table
from quark.report.summary import sqnr_text
from quark.text import json_value

if TYPE_CHECKING:
    from quark.inspect.diagnose import Divergence

LINES_AROUND = 4
BELOW_DB = 10.0
SAMPLES = 16
MOST_PARTS = 5


@click.command()
@click.argument("float_model", metavar="FLOAT", type=PATH)
@click.argument("quantized", metavar="QUANT", type=PATH)
@click.option(
    "--calib",
    type=PATH,
    metavar=DATA_PATHS,
    help="Data to run the models on: a folder of images, or arrays named after the inputs.",
)
@random_option
@click.option(
    "--num",
    "count",
    type=COUNT,
    default=SAMPLES,
    show_default=True,
    metavar="N",
    help="Use N evenly spaced samples.",
)
@click.option(
    "--below",
    type=float,
    default=BELOW_DB,
    show_default=True,
    metavar="DB",
    help="The signal-to-noise ratio below which the models are considered to diverge.",
)
@preprocess_option
@click.option("--try/--no-try", "is_trying", default=None, help=TRY_HELP.format(model="QUANT"))
@json_option()
def debug(
    float_model: Path,
    quantized: Path,
    calib: Path | None,
    is_random: bool,
    count: int,
    below: float,
    preprocess: str,
    is_trying: bool | None,
    as_json: bool,
) -> None:
    """Find the first layer where two models diverge.

    Compares the quantized model QUANT with the model FLOAT that it was made from. Every layer has two figures: `local`
    is the layer's own error, given the float model's inputs; `accumulated` also includes the errors of all earlier
    layers. Both are signal-to-noise ratios in dB; higher is better. The exit status is 0 whatever is found.
    """

    start = time.monotonic()
    calibration = Calibration(calib, count, preprocess=preprocess, is_random=is_random)
    diagnosis = diagnose(
        float_model,
        quantized,
        calib,
        num_samples=count,
        histograms=0,
        preprocessing=preprocess,
        has_sensitivity=False,
        use_random_data=is_random,
    )
    if is_trying or (is_trying is None and diagnosis.verdict is not Verdict.OK):
        diagnosis = with_suggestions(diagnosis, float_model, quantized, calibration, time.monotonic() - start)
    divergence = first_divergence(diagnosis, below_db=below)
    if not as_json:
        _show(diagnosis, divergence, below, suggestion_lines(diagnosis, float_model, quantized, calibration))
        return
    content: dict[str, Any] | None = None
    if divergence is not None:
        content = {**asdict(divergence), "layer": divergence.layer.name, "worst": divergence.worst.name}
    say_json({"below_db": below, "divergence": json_value(content), "diagnosis": diagnosis.to_dict()})


def _show(diagnosis: Diagnosis, divergence: Divergence | None, below: float, suggestions: list[str]) -> None:
    console = Console()

    def say(text: str = "", style: str = "") -> None:
        console.print(cell(text, style))

    outputs = (
        ", ".join(f"{output.name} {sqnr_text(output.sqnr_db)} dB" for output in diagnosis.outputs)
        or "nothing to compare"
    )
    names = f"{diagnosis.source.name} and {diagnosis.result.name}"
    say(f"{names} on {diagnosis.basis.data}: {diagnosis.verdict.value} ({outputs})")
    parts = [(output, part) for output in diagnosis.outputs for part in output.parts]
    for output, part in sorted(parts, key=lambda pair: -pair[1].severity)[:MOST_PARTS]:
        say(f"  {part.verdict.value}: output '{output.name}' {part.text()}")
    if divergence is None:
        say("they do not diverge: every layer computes the same", "bold")
        return
    layer = divergence.layer
    say()
    if divergence.is_below:
        say(f"they diverge at {layer.op_type} '{layer.name}': the first layer below {below:g} dB", "bold")
    else:
        lost = f"{divergence.loss_db:.1f} dB less than before it"
        say(f"no layer is below {below:g} dB; most is lost at {layer.op_type} '{layer.name}': {lost}", "bold")
    say(_origin(divergence))
    console.print(_table(diagnosis, divergence))
    for cause in layer.causes:
        say(f"  - {cause}")
    if any(suggestion.outcome is not Outcome.UNTRIED for suggestion in diagnosis.suggestions):
        for line in suggestions:
            console.say(line)
    elif layer.remedies:
        where = "" if divergence.is_own else " about it; but look at the layers before it first"
        say(f"what to try{where} (not tried):")
        for remedy in layer.remedies:
            console.say(f"  - {remedy.text}" + (f": {remedy.arguments}" if remedy.arguments else ""))
    for remark in diagnosis.remarks:
        say(f"note: {remark}", "dim")


def _origin(divergence: Divergence) -> str:
    """Say how much of the layer's error is its own, and which earlier layer has the largest error of its own."""
    own = f"its own rounding causes {100 * divergence.share:.0f} % of its error"
    if divergence.is_own:
        return f"{own}: this layer is the cause"
    worst = divergence.worst
    local = "" if worst.local is None else f" ({sqnr_text(worst.local.sqnr_db)} dB by itself)"
    return f"{own}; the rest is inherited, and the largest error so far is that of '{worst.name}'{local}"


def _table(diagnosis: Diagnosis, divergence: Divergence) -> Table:
    table = plain_table(("", "layer", "operator", "weights, inputs"), ("local dB", "accumulated dB"))
    first = max(0, divergence.index - LINES_AROUND)
    for index, layer in enumerate(diagnosis.layers[first : divergence.index + LINES_AROUND + 1], first):
        is_it = index == divergence.index
        formats = ", ".join(filter(None, (layer.weights, layer.inputs))) or "float"
        cells = [">" if is_it else "", layer.name, layer.op_type, formats]
        cells += ["-" if figure is None else sqnr_text(figure.sqnr_db) for figure in (layer.local, layer.accumulated)]
        table.add_row(*(cell(text, "bold" if is_it else "") for text in cells))
    return table
