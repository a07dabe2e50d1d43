"""How long finetuning takes, from a model file to a quantized file, against the peer with the same settings.

    python -m bench.finetune --models DIR --calib DIR [--peer PYTHON] [--presets NAME ...] [--images 16]
                             [--iterations 20] [--batch-size 2] [--repeat 1]

The peer takes hours where its presets are left as they are, so that images and iterations are cut, for both alike. All
layers are finetuned. Early stopping is off: everyone does all of the iterations.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench.child import OURS, PEER, ChildError, Interpreters
from bench.networks import NamedModel, add_arguments, chosen_models, positive
from bench.quantize import Runs
from bench.results import describe_machine, markdown, number, say, times, with_spread, write_json
from bench.samples import SampleFile, write_samples

HEADER = ["model", "preset", "ours s", "peer s", "peer / ours", "ours peak MB", "peer peak MB"]
PRESETS = ["XINT8_ADAROUND", "A8W8_ADAROUND", "MXFP8E4M3_ADAQUANT"]


def measure(
    model: NamedModel, arguments: argparse.Namespace, interpreters: Interpreters, samples: SampleFile, folder: Path
) -> list[tuple[str, Runs, Runs]]:
    """Preset, our runs, the peer's runs."""
    settings: dict[str, Any] = {
        "DataSize": arguments.images,
        "NumIterations": arguments.iterations,
        "BatchSize": arguments.batch_size,
        "EarlyStop": False,
    }
    rows = []
    for preset in arguments.presets:
        runs = {who: Runs() for who in (OURS, PEER)}
        for turn in range(arguments.repeat):
            for who in interpreters.quantizers:
                if runs[who].error:
                    continue
                try:
                    with tempfile.TemporaryDirectory(dir=folder) as output:
                        target = Path(output, "quantized.onnx")
                        runs[who].outcomes.append(interpreters.quantize(who, model, samples, preset, target, settings))
                except ChildError as error:
                    runs[who].error = str(error)
                what = runs[who].error or f"{runs[who].outcomes[-1].seconds:.1f} s"
                say(f"{model.name} {preset} {who}, run {turn + 1} of {arguments.repeat}: {what}")
        rows.append((preset, runs[OURS], runs[PEER]))
    return rows


def cells(model: NamedModel, preset: str, ours: Runs, peer: Runs) -> list[str]:
    ratio = times(peer.best, ours.best, 1)
    memory = [number(each.peak_mb, 0) for each in (ours, peer)]
    return [model.name, preset, with_spread(ours.seconds), with_spread(peer.seconds), ratio, *memory]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(presets=PRESETS)
    parser.add_argument("--images", type=positive, default=16, help="to calibrate and finetune on (%(default)s)")
    parser.add_argument("--iterations", type=positive, default=20, help="for each layer (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=2, help="(%(default)s)")
    parser.add_argument("--repeat", type=positive, default=1, help="runs of each; the best counts (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    interpreters = Interpreters(arguments.peer)
    setting = f"{describe_machine()}; {interpreters.describe_peer()}"
    table: list[list[str]] = []
    figures: list[dict[str, Any]] = []
    for model in chosen_models(arguments):
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            samples = write_samples(model, arguments.calib, arguments.images, Path(folder))
            for preset, ours, peer in measure(model, arguments, interpreters, samples, Path(folder)):
                table.append(cells(model, preset, ours, peer))
                runs = {"ours": ours.to_json(), "peer": peer.to_json()}
                figures.append({"model": model.name, "preset": preset, **runs})
        write_json(arguments, setting, figures)
    print(f"{setting}; {arguments.images} images, {arguments.iterations} iterations, batch {arguments.batch_size}\n")
    print(markdown(HEADER, table))


if __name__ == "__main__":
    main()
