"""`quark evaluate`: how good and how fast a model is."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.data_options import data_options
from quark.cli.terminal import say, say_json


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@data_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def evaluate(
    model: Path,
    data: Path,
    limit: int | None,
    labels: Path | None,
    batch_size: int,
    threads: int | None,
    preprocess: str,
    as_json: bool,
) -> None:
    """Measure the accuracy and speed of MODEL.

    Accuracy is top-1 and top-5. The data is labelled by one folder per class, as in ImageNet: classes are numbered in
    the sorted order of the folders.
    """
    from quark.evaluate import Network, open_dataset
    from quark.evaluate import evaluate as evaluate_network

    network = Network(model, threads)
    result = evaluate_network(network, open_dataset(data, network, preprocess, limit, labels), batch_size)
    if as_json:
        say_json(result.to_json())
        return
    say(f"{result.model} on {result.accuracy.count} samples of {result.data}")
    say(f"top-1 {100 * result.accuracy.top1:.2f} %")
    say(f"top-5 {100 * result.accuracy.top5:.2f} %")
    speed = result.speed
    say(f"{speed.ms_per_sample:.2f} ms/sample (best of {speed.repeats}, batches of {speed.batch_size})")
    for remark in result.remarks:
        say(f"note: {remark}", err=True)
