"""Quantization-aware training by several tools: accuracy after the same work, and the time of a step.

    python -m bench.qat --data cifar10.npz --weights resnet20.th [--methods lsq8 lsq4 mxfp4] [--epochs 2]
                        [--images 10000] [--learning_rate 0.01] [--device cpu|cuda] [--peers amd-quark-torch brevitas]

ResNet-20 on CIFAR-10. Every tool quantizes inputs and weights of all products, and its network is trained by the same
loop on the same images: SGD, half a cosine, 0.9 of the loss is the distance from the float network.

    lsq8     8 bits; learned scales
    lsq4     4 bits, and 8 in the first and the last layer; learned scales (Brevitas learns those of activations)
    mxfp4    MXFP4 (not made with Brevitas)

The time of a step is relative to the float network's in the same process, with steps of both in turns. `--epochs 0`
only times steps. Epochs are not chosen: the last one counts. `bench.qat_cifar` has our own training loop.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.cells import number, times, with_spread
from bench.child import NO_EQUIVALENT, ChildError, blank
from bench.devices import describe_device
from bench.peers import TRAINERS, add_peer_arguments, open_peers
from bench.record import Blank, Record, add_record_arguments, say
from bench.timing import Timing

HEADER = ["method", "quantizer", "float", "PTQ", "QAT", "ms of a step", "of float"]
METHODS = ("lsq8", "lsq4", "mxfp4")
ABSENT = {("brevitas", "mxfp4")}  # not made here: a layer of 3 or 16 channels has no whole group of 32


def cells(method: str, title: str, found: dict[str, Any]) -> list[str]:
    """A row; what was not measured is blank."""
    accuracies = [number(found.get(f"{name}_top1")) for name in ("float", "ptq", "qat")]
    seconds = {name: Timing.of(each) for name, each in found.get("seconds", {}).items()}
    own, whole = seconds.get("quantized"), seconds.get("float")
    relation = times(own and own.best, whole and whole.best)
    return [method, title, *accuracies, with_spread(own, 1e3), relation]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="cifar10.npz")
    parser.add_argument("--weights", type=Path, required=True, help="resnet20.th")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5, help="of steps; 0 times none (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="in a row, in each turn (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_peer_arguments(parser, tuple(TRAINERS))
    add_record_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    tools = open_peers(arguments)
    where = f"On {describe_device(arguments.device)}, batch {arguments.batch}; best of {arguments.turns} turns."
    record = Record.begin("qat", arguments, HEADER, [where], tools.facts)
    names = ("images", "epochs", "batch", "learning_rate", "device", "threads", "turns", "steps", "seed")
    settings = {name: getattr(arguments, name) for name in names} | {"calibration": 1000, "distillation": 0.9}
    places = {name: str(getattr(arguments, name).absolute()) for name in ("data", "weights")}
    for method in arguments.methods:
        for who in tools.quantizers:
            title = tools.titles.get(who, "quark")
            found: dict[str, Any] = {}
            blanks: list[Blank] = []
            try:
                job = {**settings, **places, "who": who, "method": method}
                found = {} if (who, method) in ABSENT else tools.run(who, "one_training.py", job)
                blanks = [] if found else [blank(who, "resnet20", method, NO_EQUIVALENT)]
            except ChildError as error:
                say(f"{title}, {method}: {error}")
                blanks = [blank(who, "resnet20", method, str(error))]
            say(" ".join(cells(method, title, found)))
            record.add([cells(method, title, found)], {"method": method, "who": who, **found}, blanks)
    record.finish()


if __name__ == "__main__":
    main()
