"""`quark quantize-torch`, quantize.py of the examples: quantize, train and export a torchvision network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.errors import ErrorReportingCommand
from quark.cli.options import COUNT, PATH
from quark.cli.terminal import say
from quark.errors import InvalidValueError, MissingDependencyError
from quark.files.foreign import Fields
from quark.report.console import Console, Table

if TYPE_CHECKING:
    from quark.card import Card
    from quark.vision.quantizing import ClassifierQuantization, Measured, QuantizedClassifier
    from quark.vision.training import EpochResult

METHODS = {
    "tqt": "Learned thresholds with power-of-two scales (TQT).",
    "lsq": "Learned step sizes (LSQ).",
    "non_overflow": "Smallest power-of-two scales without clipping.",
    "mse_powof2": "Power-of-two scales with the least squared error.",
}
PRECISIONS = {
    "a8w8": "8-bit activations and weights (the default).",
    "a16w8": "16-bit activations, 8-bit weights.",
    "a8w4": "8-bit activations, 4-bit weights in groups of 32.",
    "fp8": "8-bit floats (E4M3).",
    "nvfp4": "4-bit floats in blocks of 16 (NVFP4).",
}


def _flags(names: dict[str, str]) -> list[Any]:
    return [click.option(f"--{name}", is_flag=True, help=text) for name, text in names.items()]


OPTIONS = [
    click.option("--model_name", required=True, metavar="NAME", help="resnet18, resnet34, resnet50 or mobilenetv2."),
    click.option(
        "--pretrained", required=True, type=PATH, metavar="PTH", help="The weights, as torchvision saves them."
    ),
    click.option(
        "--data_dir", required=True, type=PATH, metavar="DIR", help="Folder with val/CLASS/*, and train or calib."
    ),
    click.option("--qat", is_flag=True, help="Train the quantized network."),
    *_flags(METHODS),
    *_flags(PRECISIONS),
    click.option("--model_export", type=click.Choice(["onnx"]), help="Export the result in this format."),
    click.option(
        "--simulate_runtime",
        is_flag=True,
        help="Train and evaluate with the integer arithmetic of ONNX Runtime, which the file then repeats bit for bit.",
    ),
    click.option("--export_dir", type=PATH, default=Path("export"), show_default=True, help="Output folder."),
    click.option("--epochs", type=COUNT, default=3, show_default=True),
    click.option("--batch_size", type=COUNT, default=32, show_default=True, help="Images per step and process."),
    click.option("--learning_rate", type=float, default=1e-5, show_default=True),
    click.option("--threshold_learning_rate", type=float, help="Learning rate of the quantizers' thresholds or steps."),
    click.option("--optimizer", type=click.Choice(["adam", "sgd"]), default="adam", show_default=True),
    click.option("--weight_decay", type=float, default=1e-4, show_default=True),
    click.option("--label_smoothing", type=float, default=0.0, show_default=True),
    click.option(
        "--distillation",
        type=float,
        default=0.0,
        show_default=True,
        help="Share of the loss that compares with the float network.",
    ),
    click.option("--ema", type=float, metavar="DECAY", help="Keep a running average of the weights, with this decay."),
    click.option(
        "--freeze_bn",
        type=float,
        default=0.0,
        show_default=True,
        help="Share of the epochs before batch norms are frozen.",
    ),
    click.option("--patience", type=COUNT, metavar="EPOCHS", help="Stop after this many epochs without improvement."),
    click.option("--clip_norm", type=float, help="Clip gradients to this norm."),
    click.option("--autocast", type=click.Choice(["bfloat16", "float16"]), help="Train in mixed precision."),
    click.option("--compile", "compiles", is_flag=True, help="Train with torch.compile."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--resume", is_flag=True, help="Resume the run in the same export_dir."),
    click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda"),
    click.option(
        "--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Processes that decode images."
    ),
    click.option("--calibration_images", type=COUNT, default=500, show_default=True),
    click.option("--limit", type=COUNT, metavar="N", help="Evaluate on N evenly spaced images (default: all)."),
    click.option("--image_size", type=COUNT, default=224, show_default=True),
]

OF_A_MACHINE = frozenset({"pretrained", "data_dir", "export_dir", "resume", "device", "workers"})


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command("quantize-torch", cls=ErrorReportingCommand, context_settings={"help_option_names": ["-h", "--help"]})
@_with_options
def quantize_torch(**options: Any) -> None:
    """Quantize, train and export a torchvision network.

    --qat trains the quantized network; --model_export writes an ONNX file. Prints the top-1 and top-5 accuracy of every
    form on the same images. Can be started with torchrun, on one machine or several.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "quantize-torch needs torch, which is not installed: pip install torch onnxscript safetensors"
        ) from error
    from quark.vision.quantizing import Listener, quantize_classifier
    from quark.vision.training import choose_device, joined

    request = _request(options)

    def tell_accuracy(form: Measured) -> None:
        accuracy = form.scores.accuracy
        say(f"{form.name}: top-1 {100 * accuracy.top1:.2f} %, top-5 {100 * accuracy.top5:.2f} %", err=True)

    def tell_epoch(result: EpochResult) -> None:
        if result.loss is not None:
            shares = f"top-1 {100 * result.top1:.2f} %, top-5 {100 * result.top5:.2f} %"
            epoch = f"epoch {result.epoch} of {options['epochs']}"
            say(f"{epoch}: loss {result.loss:.4f}, {shares}, {result.seconds:.0f} s", err=True)

    with joined(choose_device(options["device"])) as processes:
        listener = Listener(tell_accuracy, tell_epoch) if processes.is_first else Listener()
        result = quantize_classifier(request, processes, listener)
        if processes.is_first:
            _show(result)


def request_of(card: Card, weights: Path, data_dir: Path, export_dir: Path) -> ClassifierQuantization:
    """Return the request that a card holds, parsed and checked like the equivalent command line. Options that do not
    affect the bytes, such as --help and output paths, are rejected, because cards are untrusted."""
    assert card.torch is not None
    known = {name.removeprefix("--") for option in quantize_torch.params for name in option.opts}
    Fields(card.torch.request, "card", "torch.request").refuse_others(known - OF_A_MACHINE)
    places = {"pretrained": weights, "data_dir": data_dir, "export_dir": export_dir}
    arguments = []
    for name, value in {**card.torch.request, **places}.items():
        arguments += [f"--{name}"] if value is True else [f"--{name}={value}"]
    try:
        return _request(quantize_torch.make_context("quantize-torch", arguments).params)
    except click.UsageError as error:
        raise InvalidValueError(f"card: field 'torch.request': {error.format_message()}") from error


def _request(options: dict[str, Any]) -> ClassifierQuantization:
    from quark.vision.quantizing import ClassifierQuantization, ImageOptions, Method, Precision
    from quark.vision.training import Autocast, OptimizerName, TrainingOptions

    if options["resume"] and not options["qat"]:
        raise click.UsageError("--resume continues training: give --qat too")
    images = ImageOptions(
        options["image_size"],
        options["batch_size"],
        options["workers"],
        options["calibration_images"],
        options["limit"],
    )
    method = Method(_only(options, METHODS) or Method.FLOAT_SCALE)
    precision = Precision(_only(options, PRECISIONS) or Precision.A8W8)
    training = None
    if options["qat"]:
        same = ("epochs", "learning_rate", "threshold_learning_rate", "weight_decay", "label_smoothing", "distillation")
        training = TrainingOptions(
            **{name: options[name] for name in (*same, "patience", "clip_norm", "compiles", "seed")},
            optimizer=OptimizerName(options["optimizer"]),
            average_decay=options["ema"],
            batch_norm_share=options["freeze_bn"],
            autocast=None if options["autocast"] is None else Autocast(options["autocast"]),
        )
    return ClassifierQuantization(
        options["model_name"],
        options["pretrained"],
        options["data_dir"],
        options["export_dir"],
        method,
        precision,
        images,
        training,
        options["model_export"] is not None,
        options["resume"],
        options["simulate_runtime"],
    )


def _only(options: dict[str, Any], names: dict[str, str]) -> str | None:
    """Return the flag that was given, if any; two of them are a usage error."""
    given = [name for name in names if options[name]]
    if len(given) > 1:
        raise click.UsageError(f"--{given[0]} and --{given[1]} exclude each other: give one of them")
    return given[0] if given else None


def _show(result: QuantizedClassifier) -> None:
    first = result.measured[0].scores
    table = Table(title=f"{first.accuracy.count} images", title_justify="left")
    table.add_column("network")
    for heading in ("top-1", "top-5", "to float", "same class as before"):
        table.add_column(heading, justify="right")
    before = first
    for measured in result.measured:
        accuracy, pair = measured.scores.accuracy, first.paired_with(measured.scores)
        cells = [f"{100 * accuracy.top1:.2f} %", f"{100 * accuracy.top5:.2f} %"]
        if measured.scores is not first:
            cells.append(f"{100 * pair.top1_difference:+.2f} +- {100 * pair.standard_error:.2f}")
            cells.append(f"{100 * before.agreement(measured.scores):.2f} %")
        table.add_row(measured.name, *cells)
        before = measured.scores
    console = Console()
    console.print(table)
    if result.training is not None:
        best, last = result.training.best.epoch, result.training.history[-1].epoch
        stopped = ", where patience ran out" if result.training.is_stopped_early else ""
        origin = ", the calibrated network: training did not improve it" if best == 0 else ""
        console.say(f"trained up to epoch {last}{stopped}; the best is epoch {best}{origin}")
    if result.path is not None:
        console.say(f"written: {result.path}")
    for note in result.notes:
        say(f"note: {note}", err=True)
