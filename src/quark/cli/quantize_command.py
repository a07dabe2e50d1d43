"""`quark quantize`: a float model and some data in, a quantized model and an account of it out."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.calibration_option import Calibration
from quark.cli.config_option import DEFAULT_CONFIG, Change, parse_changes
from quark.cli.data_options import preprocess_option

DROP_EXCEEDED = 3


@click.command()
@click.argument("model_in", metavar="IN", type=click.Path(path_type=Path))
@click.argument("model_out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--config",
    default=DEFAULT_CONFIG,
    show_default=True,
    metavar="NAME|FILE.yaml",
    help="A preset ('quark presets' lists them), or a file.",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE.npz",
    help="What the model will see: a folder of images, or arrays [n, ...] named like its inputs. Without it, random "
    "numbers.",
)
@click.option(
    "--num-calib",
    type=click.IntRange(min=1),
    metavar="N",
    help="N samples, evenly spaced over the sorted files; else all.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Samples a run of the model."
)
@preprocess_option
@click.option(
    "--set",
    "changes",
    multiple=True,
    callback=parse_changes,
    metavar="KEY=VALUE",
    help="Change a field (per_channel=true), an option (Percentile=99.99) or a part of one "
    "(MXAttributes.scale_rule=rceil). Repeatable.",
)
@click.option(
    "--max-drop",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Exit with status 3 where more than X percentage points are lost; the files are written all the same. With "
    "--data: of top-1 accuracy. Else of equal predictions on held-out samples, 100 (1 - agreement), for outputs with "
    "classes, and 100 (1 - cosine) for others; the worst output counts.",
)
@click.option("--data", type=click.Path(path_type=Path), metavar="DIR", help="Labelled images, for --max-drop alone.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the summary.")
def quantize(
    model_in: Path,
    model_out: Path,
    config: str,
    calib: Path | None,
    num_calib: int | None,
    batch_size: int,
    preprocess: str,
    changes: tuple[Change, ...],
    max_drop: float | None,
    data: Path | None,
    as_json: bool,
) -> None:
    """Quantize the model IN and write it to OUT, with a report as JSON beside it.

    \b
    Exit status: 0 done, whatever the verdict
                 1 an error
                 2 a mistake in the command line
                 3 --max-drop exceeded
    """
    from quark.cli.drop import measured_drop
    from quark.cli.quantization import Quantization

    if data is not None and max_drop is None:
        raise click.UsageError("--data is for --max-drop: give a limit, or compare afterwards with 'quark compare'")
    calibration = Calibration(calib, num_calib, batch_size, preprocess)
    quantization = Quantization(model_in, model_out, config, changes, calibration)
    result = quantization.run()
    quantization.show(result, as_json)
    if max_drop is not None:
        drop = measured_drop(result.report, model_in, model_out, data, preprocess)
        if drop.points > max_drop:
            click.echo(f"Error: {drop} lost, more than --max-drop {max_drop:g}", err=True)
            raise SystemExit(DROP_EXCEEDED)
