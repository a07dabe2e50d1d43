"""`quark debug`: the first layer where a quantized network parts from the float one."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.calibration_option import Calibration, random_option
from quark.cli.data_options import preprocess_option
from quark.cli.terminal import say_json

if TYPE_CHECKING:
    from quark.diagnosis import Diagnosis, LayerDiagnosis
    from quark.onnx.diagnose import Divergence
    from quark.report.console import Table

LINES_AROUND = 4
BELOW_DB = 10.0
SAMPLES = 16
MOST_PARTS = 5


@click.command()
@click.argument("float_model", metavar="FLOAT", type=click.Path(path_type=Path))
@click.argument("quantized", metavar="QUANT", type=click.Path(path_type=Path))
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE.npz",
    help="Data to run the models on: a folder of images, or arrays named after the inputs.",
)
@random_option
@click.option(
    "--num",
    "count",
    type=click.IntRange(min=1),
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
@click.option(
    "--try/--no-try",
    "is_trying",
    default=None,
    help="Quantize again with each suggestion, and show only those that help, with their gain. This is the default if "
    "the verdict is not ok and QUANT records how it was made.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
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
    from quark.cli.report_command import with_suggestions
    from quark.fidelity import Verdict
    from quark.onnx.diagnose import diagnose, first_divergence

    start = time.monotonic()
    calibration = Calibration(calib, count, preprocess=preprocess, is_random=is_random)
    found = diagnose(
        float_model,
        quantized,
        calib,
        num_samples=count,
        histograms=0,
        preprocessing=preprocess,
        has_sensitivity=False,
        use_random_data=is_random,
    )
    if is_trying or (is_trying is None and found.verdict is not Verdict.OK):
        found = with_suggestions(found, float_model, quantized, calibration, time.monotonic() - start)
    divergence = first_divergence(found, below_db=below)
    if as_json:
        say_json(_content(found, divergence, below))
        return
    _show(found, divergence, below)


def _content(found: Diagnosis, divergence: Divergence | None, below: float) -> dict[str, Any]:
    """The diagnosis, and where they part: its `layer` is the number of a layer there."""
    parted = None
    if divergence is not None:
        parted = {**asdict(divergence), "layer": divergence.layer.name, "worst": divergence.worst.name}
        parted = {key: _finite(value) for key, value in parted.items()}
    return {"below_db": below, "divergence": parted, "diagnosis": found.to_dict()}


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _show(found: Diagnosis, divergence: Divergence | None, below: float) -> None:
    from quark.cli.report_command import suggestion_lines
    from quark.diagnosis import Outcome
    from quark.report.console import Console, cell
    from quark.report.summary import sqnr_text

    console = Console()

    def say(text: str = "", style: str = "") -> None:
        console.print(cell(text, style))

    outputs = ", ".join(f"{each.name} {sqnr_text(each.sqnr_db)} dB" for each in found.outputs) or "nothing to compare"
    say(f"{found.source.name} and {found.result.name} on {found.basis.data}: {found.verdict.value} ({outputs})")
    parts = [(output, part) for output in found.outputs for part in output.parts]
    for output, part in sorted(parts, key=lambda pair: -pair[1].severity)[:MOST_PARTS]:
        say(f"  {part.verdict.value}: output '{output.name}' {part.text()}")
    if divergence is None:
        say("they do not part: every layer computes the same", "bold")
        return
    layer = divergence.layer
    say()
    say(_headline(divergence, below), "bold")
    say(_blame(divergence))
    console.print(_table(found, divergence))
    for cause in layer.causes:
        say(f"  - {cause}")
    was_tried = any(each.outcome is not Outcome.UNTRIED for each in found.suggestions)
    if was_tried:
        for line in suggestion_lines(found):
            console.say(line)
    elif layer.remedies:
        where = "" if divergence.is_own else " about it; but look at the layers before it first"
        say(f"what to try{where} (not tried):")
        for remedy in layer.remedies:
            console.say(f"  - {remedy.text}" + (f": {remedy.arguments}" if remedy.arguments else ""))
    for remark in found.remarks:
        say(f"note: {remark}", "dim")


def _headline(divergence: Divergence, below: float) -> str:
    layer = divergence.layer
    if divergence.is_below:
        return f"they part at {layer.op_type} '{layer.name}': the first layer below {below:g} dB"
    return (
        f"no layer is below {below:g} dB; most is lost at {layer.op_type} '{layer.name}': {divergence.loss_db:.1f} dB "
        "less than before it"
    )


def _blame(divergence: Divergence) -> str:
    from quark.report.summary import sqnr_text

    own = f"its own rounding makes {100 * divergence.share:.0f} % of its error"
    if divergence.is_own:
        return f"{own}: its own doing"
    worst = divergence.worst
    local = "" if worst.local is None else f" ({sqnr_text(worst.local.sqnr_db)} dB by itself)"
    return f"{own}: the rest is inherited; the greatest error of its own so far has '{worst.name}'{local}"


def _table(found: Diagnosis, divergence: Divergence) -> Table:
    from quark.report.console import cell, plain_table
    from quark.report.summary import sqnr_text

    table = plain_table()
    for heading in ("", "layer", "operator", "weights, inputs"):
        table.add_column(heading, overflow="fold")
    for heading in ("local dB", "accumulated dB"):
        table.add_column(heading, justify="right")
    first = max(0, divergence.index - LINES_AROUND)
    for index, each in enumerate(found.layers[first : divergence.index + LINES_AROUND + 1], first):
        is_it = index == divergence.index
        figures = (each.local, each.accumulated)
        cells = [">" if is_it else "", each.name, each.op_type, _formats(each)]
        cells += ["-" if figure is None else sqnr_text(figure.sqnr_db) for figure in figures]
        table.add_row(*(cell(text, "bold" if is_it else "") for text in cells))
    return table


def _formats(layer: LayerDiagnosis) -> str:
    return ", ".join(filter(None, (layer.weights, layer.inputs))) or "float"
