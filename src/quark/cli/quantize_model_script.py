"""quantize_model.py of the examples: `quark quantize` with the flags that the documents show."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.calibration_option import Calibration, random_option
from quark.cli.errors import ErrorReportingCommand, debug_option


@click.command(cls=ErrorReportingCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--input_model_path", required=True, type=click.Path(path_type=Path), help="The float model.")
@click.option(
    "--output_model_path", required=True, type=click.Path(path_type=Path), help="The quantized model to write."
)
@click.option("--calibration_dataset_path", type=click.Path(path_type=Path), help="A folder of images.")
@random_option
@click.option("--config", required=True, metavar="NAME|FILE.yaml", help="A preset, such as MXINT8, or a file.")
@click.option("--num_calib_data", type=click.IntRange(min=1), default=1000, show_default=True, help="Images to use.")
@click.option("--batch_size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda|rocm", help="Where calibration runs.")
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
    from quark.cli.quantization import Quantization
    from quark.evaluate.devices import providers_of

    providers = providers_of(device)
    changes = () if device == "cpu" else (("execution_providers", list(providers)),)
    calibration = Calibration(calibration_dataset_path, num_calib_data, batch_size, is_random=is_random)
    quantization = Quantization(input_model_path, output_model_path, config, changes, calibration)
    quantization.show(quantization.run())


quantize_model.params.append(debug_option())
