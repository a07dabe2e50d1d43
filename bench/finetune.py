"""How long finetuning takes, from model file to quantized file, compared with AMD Quark with the same settings.

    python -m bench.finetune --models DIR --calib DIR [--peers amd-quark] [--presets NAME ...] [--images 16]
                             [--iterations 20] [--batch-size 2] [--repeat 1]

AMD Quark takes hours with its unchanged presets, so the number of images and iterations is reduced for both tools. All
layers are finetuned. Early stopping is off, so both run all iterations.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench.models import add_arguments, chosen_models, label, positive
from bench.peers import add_peer_arguments, open_peers
from bench.record import Record
from bench.runs import (
    Quantizers,
    blanks,
    memory_cells,
    memory_header,
    processor_cells,
    processor_header,
    time_cells,
    time_header,
)
from bench.samples import write_samples

PRESETS = ["XINT8_ADAROUND", "A8W8_ADAROUND", "MXFP8E4M3_ADAQUANT"]
PEERS = ["amd-quark"]  # no other finetunes


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """In the words of a preset's FastFinetune."""
    return {
        "DataSize": arguments.images,
        "NumIterations": arguments.iterations,
        "BatchSize": arguments.batch_size,
        "EarlyStop": False,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_peer_arguments(parser, PEERS)
    parser.set_defaults(presets=PRESETS)
    parser.add_argument("--images", type=positive, default=16, help="to calibrate and finetune on (%(default)s)")
    parser.add_argument("--iterations", type=positive, default=20, help="for each layer (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=2, help="(%(default)s)")
    parser.add_argument("--repeat", type=positive, default=1, help="runs of each; the best counts (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    models = chosen_models(arguments)
    interpreters = open_peers(arguments)
    titles, peers = list(interpreters.titles.values()), list(interpreters.titles)
    header = ["model", "preset", *time_header(titles), *processor_header(titles), *memory_header(titles)]
    notes = [f"{arguments.images} images, {arguments.iterations} iterations, batch {arguments.batch_size}."]
    record = Record.begin("finetune", arguments, header, notes, interpreters.facts)
    for model in models:
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            samples = write_samples(model, arguments.calib, arguments.images, Path(folder))
            quantizers = Quantizers(interpreters, model, samples, Path(folder), settings_of(arguments))
            for preset in arguments.presets:
                runs = quantizers.take_turns(preset, arguments.repeat)
                cells = (of(runs, peers) for of in (time_cells, processor_cells, memory_cells))
                row = [model.name, label(preset), *(cell for some in cells for cell in some)]
                figure = {"model": model.name, "preset": label(preset)}
                figure |= {who: run.to_json() for who, run in runs.items()}
                record.add([row], figure, blanks(runs, model.name, preset))
    record.finish()


if __name__ == "__main__":
    main()
