"""What a GPU does for quark: networks and operators on it, and how long quantizing and finetuning take there.

    python -m bench.gpu --models DIR --calib DIR [--only NAME ...] [--device cuda:0] [--parts PART ...] [--label TEXT]
                        [--batches 1 32] [--images 1000] [--iterations 1000] [--reference cpu]

    operators     one operator with input and output bound, relative to a copy of the tensor on the device
    networks      float and quantized, bound, relative to float; and how long a session takes to open
    calibration   quantizing by A8W8 on so many images, there and on the reference
    finetuning    quantizing by --preset with so many images and iterations for each layer, there alone

Milliseconds are the best of several alternating turns. It needs torch for its memory, and onnxruntime-gpu unless the
device is cpu, which tries the program.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from bench.cells import times, with_spread
from bench.devices import describe_device
from bench.models import NamedModel, add_arguments, chosen_models, positive
from bench.ops import Case, operator_model
from bench.record import Record, say
from bench.samples import write_samples
from bench.timing import take_turns
from quark.devices import Device
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.native import cuda_problem
from quark.onnx import get_default_config, quantize
from quark.onnx.session import open_session

PARTS = ("operators", "networks", "calibration", "finetuning")
PRESETS = ("INT8_CNN_DEFAULT", "MXINT8", "MXFP4E2M1")
FORMATS = ("mxint8", "mxfp4_e2m1", "mx6")
CASES = (Case((4096, 4096), 1), Case((32, 256, 56, 56), 1))
FEW_IMAGES = 8  # to quantize a network whose speed alone counts
HEADER = ["part", "what", "case", "ms", "relative"]


def bound(session: Any, feeds: dict[str, torch.Tensor], device: torch.device) -> Callable[[], None]:
    """A run with all tensors on the device; it ends when the device has."""
    binding = session.io_binding()
    where = (device.type, device.index or 0)
    for name, tensor in feeds.items():
        binding.bind_input(name, *where, np.float32, tuple(tensor.shape), tensor.data_ptr())
    for port in session.get_outputs():
        binding.bind_output(port.name, *where)
    return lambda held=feeds: session.run_with_iobinding(binding)  # type: ignore[misc]


def operators(device: torch.device, name: str) -> Iterator[tuple[list[str], Any]]:
    """Each operator beside a copy."""
    for case in CASES:
        x = torch.randn(case.shape, device=device)
        target = torch.empty_like(x)

        def copied(x: torch.Tensor = x, target: torch.Tensor = target) -> None:
            target.copy_(x)
            if device.type == "cuda":
                torch.cuda.synchronize()

        runs: dict[str, Callable[[], object]] = {"copy": copied}
        for fmt in FORMATS:
            block: Any = get_format(fmt)
            quantizer = BlockQuantizer(block, nonfinite=block.default_nonfinite)
            session = open_session(operator_model(quantizer, case), providers=(name,))
            runs[fmt] = bound(session, {"x": x}, device)
        timings = take_turns(runs, 15)
        for what, timing in timings.items():
            share = f"{timings['copy'].best / timing.best:.2f} of a copy's speed"
            yield ["operators", what, str(case), with_spread(timing, 1e3, 3), share], (what, str(case), timing.best)


def networks(
    model: NamedModel, samples: Any, folder: Path, arguments: argparse.Namespace, device: torch.device
) -> Iterator[tuple[list[str], Any]]:
    """Float and quantized forms, bound on the device."""
    files = {"float": model.path}
    for preset in PRESETS:
        files[preset] = folder / f"{model.name}-{preset}.onnx"
        quantize(model.path, samples[:FEW_IMAGES], preset).save(files[preset])
    sessions = {}
    for what, file in files.items():
        start = time.perf_counter()
        sessions[what] = open_session(file, providers=(arguments.device,))
        seconds = time.perf_counter() - start
        yield ["session", f"{model.name} {what}", "opening", f"{1e3 * seconds:.0f}", ""], (model.name, what, seconds)
    (name, image), *_ = samples[0].items()
    for batch in arguments.batches:
        x = torch.from_numpy(np.repeat(image, batch, 0)).to(device)
        runs = {what: bound(session, {name: x}, device) for what, session in sessions.items()}
        timings = take_turns(runs, 10)
        for what, timing in timings.items():
            cells = ["network", f"{model.name} {what}", f"batch {batch}", with_spread(timing, 1e3)]
            yield [*cells, times(timing.best, timings["float"].best)], (model.name, what, batch, timing.best)


def seconds_of(model: NamedModel, samples: Any, config: Any) -> tuple[float, Any]:
    """How long quantizing takes, and the result."""
    start = time.perf_counter()
    found = quantize(model.path, samples, config)
    return time.perf_counter() - start, found


def calibration(model: NamedModel, samples: Any, arguments: argparse.Namespace) -> Iterator[tuple[list[str], Any]]:
    """The same quantization on both devices."""
    seconds: dict[str, float] = {}
    for device in (arguments.reference, arguments.device):
        config = get_default_config("A8W8")
        config.extra_options["InferDevice"] = device
        say(f"{model.name}: A8W8 on {device}")
        seconds[device], found = seconds_of(model, samples, config)
        relative = times(seconds[device], seconds[arguments.reference])
        case = f"{len(samples)} images, {device}"
        row = ["calibration", f"{model.name} A8W8", case, f"{1e3 * seconds[device]:.0f}", relative]
        yield row, (model.name, device, seconds[device], str(found.report.verdict.value))


def finetuning(model: NamedModel, samples: Any, arguments: argparse.Namespace) -> Iterator[tuple[list[str], Any]]:
    """From the model to the finetuned result."""
    config = get_default_config(arguments.preset)
    config.extra_options["InferDevice"] = arguments.device
    options = {"OptimDevice": arguments.device, "DataSize": len(samples), "NumIterations": arguments.iterations}
    with TemporaryDirectory() as folder:  # nothing is resumed
        config.extra_options["FastFinetune"] |= {**options, "CacheDir": folder, "EarlyStop": False}
        seconds, found = seconds_of(model, samples, config)
    case = f"{len(samples)} images, {arguments.iterations} iterations"
    row = ["finetuning", f"{model.name} {arguments.preset}", case, f"{1e3 * seconds:.0f}", ""]
    yield row, (model.name, arguments.preset, seconds, [part.to_dict() for part in found.report.outputs])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--device", default="cuda:0", help="(%(default)s)")
    parser.add_argument("--reference", default="cpu", help="for calibration (%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batches", nargs="+", type=positive, default=[1, 32])
    parser.add_argument("--images", type=positive, default=1000, help="(%(default)s)")
    parser.add_argument("--iterations", type=positive, default=1000, help="for each layer (%(default)s)")
    parser.add_argument("--preset", default="A8W8_ADAROUND", help="that finetunes (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    where = Device.parse(arguments.device)
    where.check()
    device = torch.device(str(where))
    problem = None if device.type == "cpu" else cuda_problem()
    ours = f"functions, since {problem}" if problem else "those of the library"
    notes = [f"On {describe_device(device)}; operators of ours are {ours}."]
    record = Record.begin("gpu", arguments, HEADER, notes)
    if "operators" in arguments.parts:
        for row, figure in operators(device, arguments.device):
            record.add([row], figure)
    needs_models = set(arguments.parts) - {"operators"}
    for model in chosen_models(arguments) if needs_models else []:
        with TemporaryDirectory(prefix="quark-bench-") as name:
            count = arguments.images if needs_models - {"networks"} else FEW_IMAGES
            file = write_samples(model, arguments.calib, count, Path(name))
            arrays = np.load(file.path, mmap_mode="r")
            samples = [{file.input_name: np.array(arrays[index : index + 1])} for index in range(count)]
            parts = {
                "networks": lambda: networks(model, samples, Path(name), arguments, device),  # noqa: B023
                "calibration": lambda: calibration(model, samples, arguments),  # noqa: B023
                "finetuning": lambda: finetuning(model, samples, arguments),  # noqa: B023
            }
            for part, rows in parts.items():
                for row, figure in rows() if part in arguments.parts else ():
                    record.add([row], figure)
                    say(" | ".join(row))
    record.finish()


if __name__ == "__main__":
    main()
