"""`quark evaluate`: accuracy and speed of one model. `quark compare`: two models on the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.options import PATH, data_options, device_option, json_option, metric_option
from quark.cli.terminal import say, say_json
from quark.compare import agreement_text, overall_verdict, worst_text
from quark.evaluate import Network, open_dataset
from quark.evaluate import compare as compare_networks
from quark.evaluate import evaluate as evaluate_network
from quark.measures import Measure
from quark.report.console import Console, Table, cell, plain_table
from quark.report.summary import sqnr_text

if TYPE_CHECKING:
    from quark.evaluate import Comparison


@click.command()
@click.argument("model", type=PATH)
@data_options
@device_option("Where ONNX Runtime runs the model.")
@json_option()
def evaluate(
    model: Path,
    data: Path,
    limit: int | None,
    labels: Path | None,
    batch_size: int,
    threads: int | None,
    preprocess: str,
    device: str,
    as_json: bool,
) -> None:
    """Measure the accuracy and speed of MODEL.

    Accuracy is top-1 and top-5. The data is labelled by one folder per class, as in ImageNet: classes are numbered in
    the sorted order of the folders.
    """

    network = Network(model, threads, (device,))
    result = evaluate_network(network, open_dataset(data, network, preprocess, limit, labels), batch_size)
    if as_json:
        say_json(result.to_json())
        return
    say(f"{result.model} on {result.accuracy.count} samples of {result.data}")
    say(f"top-1 {100 * result.accuracy.top1:.2f} %")
    say(f"top-5 {100 * result.accuracy.top5:.2f} %")
    speed = result.speed
    batches = f"batches of {speed.batch_size}"
    say(f"{speed.ms_per_sample:.2f} ms/sample on {result.device} (best of {speed.repeats}, {batches})")
    for remark in (*result.remarks, *filter(None, [network.remark])):
        say(f"note: {remark}", err=True)


@click.command()
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@data_options
@metric_option("Built-in measures compare the outputs on --data; functions load their own data.")
@device_option("Where ONNX Runtime runs both models.")
@json_option("Print JSON instead of tables.")
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
    device: str,
    as_json: bool,
) -> None:
    """Compare two models on the same samples.

    FIRST and SECOND are, for example, a float model and its quantized form. Labelled data gives the accuracy of both
    and the difference. Any data gives the share of equal predictions, and the cosine and signal-to-noise ratio of the
    outputs.
    """

    measure = None if metric is None else Measure.of(metric)
    networks = Network(first, threads, (device,)), Network(second, threads, (device,))
    dataset = open_dataset(data, networks[0], preprocess, limit, labels)
    result = compare_networks(*networks, dataset, batch_size, measure)
    if as_json:
        say_json(result.to_json())
        return
    console = Console()
    console.print(cell(f"{result.count} samples of {result.data}"))
    console.print(_models_table(result))
    table = plain_table(("output",), ("same class", "cosine", "SQNR dB", "largest error"))
    for output in result.outputs:
        same = agreement_text(output, digits=2)
        figures = (f"{output.cosine:.5f}", sqnr_text(output.sqnr_db), f"{output.max_error:.3g}")
        table.add_row(cell(output.name), same, *figures)
    console.print(table)
    console.print(cell(f"{overall_verdict(result.outputs).value}: {worst_text(result.outputs)}"))
    if result.measure is not None:
        console.print(cell(f"measure: {result.measure}"))
    for remark in filter(None, [network.remark for network in networks]):
        say(f"note: {remark}", err=True)


def _models_table(result: Comparison) -> Table:
    table = plain_table(("model",), ("top-1", "top-5", "ms/sample"))
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
