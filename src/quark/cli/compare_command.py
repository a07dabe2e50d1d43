"""`quark compare`: two models on the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.data_options import data_options, metric_option
from quark.cli.terminal import say_json

if TYPE_CHECKING:
    from quark.evaluate import Comparison
    from quark.report.console import Table


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@data_options
@metric_option("Built-in measures compare the outputs on --data; functions load their own data.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def compare(
    first: Path,
    second: Path,
    data: Path,
    limit: int | None,
    labels: Path | None,
    batch_size: int,
    threads: int | None,
    preprocess: str,
    metric: str | None,
    as_json: bool,
) -> None:
    """Compare two models on the same samples.

    FIRST and SECOND are, for example, a float model and its quantized form. Labelled data gives the accuracy of both
    and the difference. Any data gives the share of equal predictions, and the cosine and signal-to-noise ratio of the
    outputs.
    """
    from quark.evaluate import Network, open_dataset
    from quark.evaluate import compare as compare_networks
    from quark.measures import Measure

    measure = None if metric is None else Measure.of(metric)
    networks = Network(first, threads), Network(second, threads)
    dataset = open_dataset(data, networks[0], preprocess, limit, labels)
    result = compare_networks(*networks, dataset, batch_size, measure)
    if as_json:
        say_json(result.to_json())
        return
    from quark.fidelity import overall_verdict, worst_text
    from quark.report.console import Console, cell

    console = Console()
    console.print(cell(f"{result.count} samples of {result.data}"))
    console.print(_models_table(result))
    console.print(_outputs_table(result))
    console.print(cell(f"{overall_verdict(result.outputs).value}: {worst_text(result.outputs)}"))
    if result.measure is not None:
        console.print(cell(f"measure: {result.measure}"))


def _models_table(result: Comparison) -> Table:
    from quark.report.console import cell, plain_table

    table = plain_table()
    table.add_column("model", overflow="fold")
    for heading in ("top-1", "top-5", "ms/sample"):
        table.add_column(heading, justify="right")
    pair = result.accuracies
    for index, name in enumerate((result.first, result.second)):
        accuracy = None if pair is None else (pair.first, pair.second)[index]
        shares = ("-", "-") if accuracy is None else (f"{100 * accuracy.top1:.2f} %", f"{100 * accuracy.top5:.2f} %")
        table.add_row(cell(name), *shares, f"{result.speeds[index].ms_per_sample:.2f}")
    if pair is not None:
        table.add_row(
            "difference",
            f"{100 * pair.top1_difference:+.2f} +- {100 * pair.standard_error:.2f}",
            f"{100 * (pair.second.top5 - pair.first.top5):+.2f}",
            f"x {result.speeds[1].ms_per_sample / result.speeds[0].ms_per_sample:.2f}",
        )
    return table


def _outputs_table(result: Comparison) -> Table:
    from quark.report.console import cell, plain_table
    from quark.report.summary import sqnr_text

    table = plain_table()
    table.add_column("output", overflow="fold")
    for heading in ("same class", "cosine", "SQNR dB", "largest error"):
        table.add_column(heading, justify="right")
    for each in result.outputs:
        same = "-" if each.agreement is None else f"{100 * each.agreement:.2f} %"
        table.add_row(cell(each.name), same, f"{each.cosine:.5f}", sqnr_text(each.sqnr_db), f"{each.max_error:.3g}")
    return table
