"""Commands with the names and flags of the scripts that AMD's documents show.

advanced_quark_quantize.py   also `quark advanced-quantize`
prepare_data.py              also `quark prepare-data`
onnx_validate.py             `quark evaluate` with other flags
quantize_model.py            `quark quantize` with other flags
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quark.cli.errors import ErrorReportingCommand, debug_option
from quark.cli.options import COUNT, PATH, Calibration, preprocess_option, random_option
from quark.cli.quantize_command import Quantization
from quark.cli.terminal import say
from quark.devices import Device
from quark.evaluate import Network, evaluate, open_dataset
from quark.evaluate import prepare_data as prepare
from quark.inspect.inspection import model_bytes
from quark.onnx import PowerOfTwoMethod, QuantizationConfig, QuantType, quantize
from quark.onnx.load.reading import read_proto
from quark.onnx.save import check_output
from quark.report.console import Console, Table, cell
from quark.report.summary import print_summary

VALIDATION_FOLDER = "val_data"
PRESETS = {
    "": "XINT8",
    "fast_finetune": "INT8_CNN_ACCURATE",
    "adaround": "XINT8_ADAROUND",
    "adaquant": "XINT8_ADAQUANT",
}
HELP = {"help_option_names": ["-h", "--help"]}


@click.command("advanced-quantize", cls=ErrorReportingCommand, context_settings=HELP)
@click.option("--model_input", required=True, type=PATH, help="The float model.")
@click.option("--model_output", required=True, type=PATH, help="The quantized model to write.")
@click.option(
    "--calib_data",
    type=PATH,
    default=Path("calib_data"),
    show_default=True,
    help="Calibration images, in class folders.",
)
@click.option("--fast_finetune", "algorithm", flag_value="fast_finetune", help="Preset INT8_CNN_ACCURATE.")
@click.option("--cross_layer_equalization", "algorithm", flag_value="cle", help="XINT8 with cross-layer equalization.")
@click.option("--adaround", "algorithm", flag_value="adaround", help="Preset XINT8_ADAROUND.")
@click.option("--adaquant", "algorithm", flag_value="adaquant", help="Preset XINT8_ADAQUANT.")
@click.option("--limit", type=COUNT, metavar="N", help="Measure on N evenly spaced images (default: all).")
@preprocess_option
def advanced_quantize(
    model_input: Path, model_output: Path, calib_data: Path, algorithm: str | None, limit: int | None, preprocess: str
) -> None:
    """Quantize for an NPU; print size and accuracy.

    Without a flag, the preset is XINT8. Size and accuracy are printed for the float and the quantized model. Accuracy
    is measured on the folder val_data next to the calibration folder. If there is none, it is measured on the
    calibration images, which flatters the quantized model, and the output says so.
    """

    check_output(model_output, model_input, calib_data, preprocess)
    config: Any = PRESETS.get(algorithm or "")
    if algorithm == "cle":
        config = QuantizationConfig(
            calibrate_method=PowerOfTwoMethod.MinMSE,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            enable_npu_cnn=True,
            include_cle=True,
            extra_options={"ActivationSymmetric": True},
        )
    result = quantize(model_input, config=config, **Calibration(calib_data, preprocess=preprocess).arguments())
    result.save(model_output)
    print_summary(result.report)
    data = calib_data.resolve().parent / VALIDATION_FOLDER
    is_held_out = data.is_dir()
    table = Table(title_justify="left")
    table.add_column("model", overflow="fold")
    for heading in ("size", "top-1", "top-5", "ms/image"):
        table.add_column(heading, justify="right")
    for path in (model_input, model_output):
        network = Network(path)
        row = evaluate(network, open_dataset(data if is_held_out else calib_data, network, preprocess, limit))
        table.title = cell(f"{row.accuracy.count} images of {row.data}", "italic")
        shares = (f"{100 * row.accuracy.top1:.2f} %", f"{100 * row.accuracy.top5:.2f} %")
        size = f"{model_bytes(path, read_proto) / 1e6:.2f} MB"
        table.add_row(cell(row.model), size, *shares, f"{row.speed.ms_per_sample:.2f}")
    Console().print(table)
    if not is_held_out:
        say(
            f"measured on the calibration images themselves: there is no folder {VALIDATION_FOLDER} beside {calib_data}"
        )


@click.command("prepare-data", cls=ErrorReportingCommand)
@click.argument("val_data", type=PATH)
@click.argument("calib_data", type=PATH)
@click.option(
    "--labels",
    type=PATH,
    metavar="FILE",
    help="Classes, if the file names do not contain them: lines 'NAME CLASS'.",
)
def prepare_data(val_data: Path, calib_data: Path, labels: Path | None) -> None:
    """Sort ImageNet's images into class folders.

    Sorts the images in VAL_DATA, and copies one image of each class to CALIB_DATA. VAL_DATA contains the files of
    val_images.tar.gz (NAME_n01440764.JPEG), plain images with a file of labels, or class folders already. A second run
    changes nothing.
    """

    done = prepare(val_data, calib_data, labels)
    say(f"{val_data}: {done.classes} classes, {done.moved} images sorted into them")
    say(f"{calib_data}: {done.copied} images copied, one for each class")


@click.command(cls=ErrorReportingCommand, context_settings=HELP)
@click.argument("data", type=PATH)
@click.option("--onnx-input", required=True, type=PATH, help="The model.")
@click.option("-b", "--batch-size", type=COUNT, default=1, show_default=True)
@click.option("--gpu", is_flag=True, help="Run on a GPU.")
@preprocess_option
def onnx_validate(data: Path, onnx_input: Path, batch_size: int, gpu: bool, preprocess: str) -> None:
    """Measure the top-1 and top-5 accuracy of a model on DATA, which has one folder per class."""

    network = Network(onnx_input, providers=("gpu" if gpu else "cpu",))
    accuracy = evaluate(network, open_dataset(data, network, preprocess), batch_size).accuracy
    say(f"{accuracy.count} images: top1 {100 * accuracy.top1:.3f} %, top5 {100 * accuracy.top5:.3f} %")


@click.command(cls=ErrorReportingCommand, context_settings=HELP)
@click.option("--input_model_path", required=True, type=PATH, help="The float model.")
@click.option("--output_model_path", required=True, type=PATH, help="The quantized model to write.")
@click.option("--calibration_dataset_path", type=PATH, help="A folder of images.")
@random_option
@click.option("--config", required=True, metavar="NAME|FILE.yaml", help="A preset, such as MXINT8, or a file.")
@click.option("--num_calib_data", type=COUNT, default=1000, show_default=True, help="Images to use.")
@click.option("--batch_size", type=COUNT, default=1, show_default=True)
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda|rocm", help="Where networks are run.")
def quantize_model(
    input_model_path: Path,
    output_model_path: Path,
    calibration_dataset_path: Path | None,
    is_random: bool,
    config: str,
    num_calib_data: int,
    batch_size: int,
    device: str,
) -> None:
    """Quantize a model with a preset and print a summary."""

    Device.parse(device).check()
    changes = () if device == "cpu" else (("execution_providers", [device]),)
    calibration = Calibration(calibration_dataset_path, num_calib_data, batch_size, is_random=is_random)
    Quantization(input_model_path, output_model_path, config, changes, calibration).run()


onnx_validate.params.append(debug_option())
quantize_model.params.append(debug_option())
