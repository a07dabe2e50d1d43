"""onnx_validate.py of the examples: `quark evaluate` with the flags that the documents show."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.data_options import preprocess_option
from quark.cli.errors import ErrorReportingCommand, debug_option
from quark.cli.terminal import say


@click.command(cls=ErrorReportingCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--onnx-input", required=True, type=click.Path(path_type=Path), help="The model.")
@click.option("-b", "--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--gpu", is_flag=True, help="Run on a GPU.")
@preprocess_option
def onnx_validate(data: Path, onnx_input: Path, batch_size: int, gpu: bool, preprocess: str) -> None:
    """Measure the top-1 and top-5 accuracy of a model on DATA, which has one folder per class."""
    from quark.evaluate import Network, evaluate, open_dataset
    from quark.evaluate.devices import providers_of

    network = Network(onnx_input, providers=providers_of("gpu" if gpu else "cpu"))
    accuracy = evaluate(network, open_dataset(data, network, preprocess), batch_size).accuracy
    say(f"{accuracy.count} images: top1 {100 * accuracy.top1:.3f} %, top5 {100 * accuracy.top5:.3f} %")


onnx_validate.params.append(debug_option())
