"""advanced_quark_quantize.py of the examples, also `quark advanced-quantize`: quantize for an NPU, measure both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.calibration_option import Calibration
from quark.cli.data_options import preprocess_option
from quark.cli.errors import ErrorReportingCommand
from quark.cli.terminal import say

if TYPE_CHECKING:
    from quark.evaluate import Evaluation

VALIDATION_FOLDER = "val_data"
PRESETS = {
    "": "XINT8",
    "fast_finetune": "INT8_CNN_ACCURATE",
    "adaround": "XINT8_ADAROUND",
    "adaquant": "XINT8_ADAQUANT",
}


@click.command("advanced-quantize", cls=ErrorReportingCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model_input", required=True, type=click.Path(path_type=Path), help="The float model.")
@click.option("--model_output", required=True, type=click.Path(path_type=Path), help="The quantized model to write.")
@click.option(
    "--calib_data",
    type=click.Path(path_type=Path),
    default=Path("calib_data"),
    show_default=True,
    help="Calibration images, in class folders.",
)
@click.option("--fast_finetune", "algorithm", flag_value="fast_finetune", help="Preset INT8_CNN_ACCURATE.")
@click.option("--cross_layer_equalization", "algorithm", flag_value="cle", help="XINT8 with cross-layer equalization.")
@click.option("--adaround", "algorithm", flag_value="adaround", help="Preset XINT8_ADAROUND.")
@click.option("--adaquant", "algorithm", flag_value="adaquant", help="Preset XINT8_ADAQUANT.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Measure on N evenly spaced images (default: all)."
)
@preprocess_option
def advanced_quantize(
    model_input: Path, model_output: Path, calib_data: Path, algorithm: str | None, limit: int | None, preprocess: str
) -> None:
    """Quantize for an NPU; print size and accuracy.

    Without a flag, the preset is XINT8. Size and accuracy are printed for the float and the quantized model. Accuracy
    is measured on the folder val_data next to the calibration folder. If there is none, it is measured on the
    calibration images, which flatters the quantized model, and the output says so.
    """
    from quark.onnx import quantize
    from quark.onnx.save import check_output
    from quark.report.summary import print_summary

    check_output(model_output, model_input, calib_data, preprocess)
    calibration = Calibration(calib_data, preprocess=preprocess)
    result = quantize(model_input, config=_config(algorithm), **calibration.arguments())
    result.save(model_output)
    print_summary(result.report)
    data = calib_data.resolve().parent / VALIDATION_FOLDER
    is_held_out = data.is_dir()
    _show(
        [
            _evaluated(each, data if is_held_out else calib_data, limit, preprocess)
            for each in (model_input, model_output)
        ]
    )
    if not is_held_out:
        say(
            f"measured on the calibration images themselves: there is no folder {VALIDATION_FOLDER} beside {calib_data}"
        )


def _config(algorithm: str | None) -> Any:
    """The preset for a flag; cross-layer equalization is a config of its own."""
    if algorithm != "cle":
        return PRESETS[algorithm or ""]
    from quark.onnx import PowerOfTwoMethod, QuantizationConfig, QuantType

    return QuantizationConfig(
        calibrate_method=PowerOfTwoMethod.MinMSE,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        enable_npu_cnn=True,
        include_cle=True,
        extra_options={"ActivationSymmetric": True},
    )


def _evaluated(model: Path, data: Path, limit: int | None, preprocess: str) -> tuple[Path, Evaluation]:
    from quark.evaluate import Network, evaluate, open_dataset

    network = Network(model)
    return model, evaluate(network, open_dataset(data, network, preprocess, limit))


def _show(rows: list[tuple[Path, Evaluation]]) -> None:
    from quark.onnx.load.outline import read_proto
    from quark.report.console import Console, Table, cell
    from quark.report.inspection import model_bytes

    first = rows[0][1]
    table = Table(title=cell(f"{first.accuracy.count} images of {first.data}", "italic"), title_justify="left")
    table.add_column("model", overflow="fold")
    for heading in ("size", "top-1", "top-5", "ms/image"):
        table.add_column(heading, justify="right")
    for path, row in rows:
        shares = (f"{100 * row.accuracy.top1:.2f} %", f"{100 * row.accuracy.top5:.2f} %")
        size = f"{model_bytes(path, read_proto) / 1e6:.2f} MB"
        table.add_row(cell(row.model), size, *shares, f"{row.speed.ms_per_sample:.2f}")
    Console().print(table)
