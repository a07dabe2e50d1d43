"""Calibrated classifiers of the torch road, without training: top-1 on images they have not seen.

    python -m bench.torch_ptq --weights mobilenet_v2.pth --data IMAGENET [--calib calib --val test]
                              [--recipes float_scale mse_powof2 plain_float plain_powof2] [--calibration 500]
                              [--images N] [--device cpu|cuda]

    float_scale    8 bits; activations with a zero point, weights with a scale for each channel
    mse_powof2     8 bits, power-of-two scales: what an NPU takes
    plain_float    8 bits, symmetric, one scale for a tensor from its extremes, no accuracy algorithms: the specs that
                   AMD Quark's page on image classification shows
    plain_powof2   the same with power-of-two scales of least squared error

The first two are what `quark quantize-torch` does, with the algorithms that a configuration has if it names none. DIR
has two folders of class folders, one to calibrate on and one to judge by. All rows are about the same images, and `±`
is the standard error of a paired difference. KL is the mean divergence of the predictions from the float network's,
which tells recipes apart where a thousand images leave their top-1 within chance.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from bench.devices import describe_device
from bench.record import Record, add_record_arguments, say
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.observer import ObserverBase, PerTensorMinMaxObserver, PerTensorPowOf2MinMSEObserver
from quark.vision.data import FolderHeldOut, open_folders
from quark.vision.networks import load_network
from quark.vision.quantizing import Method, recipe
from quark.vision.training import Processes, choose_device, evaluate_module

SIZE = 224
HEADER = ["network", "recipe", "images", "float", "PTQ", "agreement", "KL", "minutes"]


def plain(observer: type[ObserverBase]) -> Config:
    """One spec for all four tensors of a layer, and nothing that improves on rounding."""
    spec = QuantizationSpec(Dtype.int8, observer, symmetric=True)
    return Config(QuantizationConfig(spec, spec, spec, spec), algo_config=[])


RECIPES: Mapping[str, Callable[[], Config]] = {
    Method.FLOAT_SCALE.value: lambda: recipe(Method.FLOAT_SCALE),
    Method.MSE_POWOF2.value: lambda: recipe(Method.MSE_POWOF2),
    "plain_float": lambda: plain(PerTensorMinMaxObserver),
    "plain_powof2": lambda: plain(PerTensorPowOf2MinMSEObserver),
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--data", type=Path, required=True, help="a folder with those of --calib and --val")
    parser.add_argument("--calib", default="calib")
    parser.add_argument("--val", default="val")
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES], choices=[*RECIPES])
    parser.add_argument("--calibration", type=int, default=500)
    parser.add_argument("--images", type=int, help="to judge by; all where not given")
    parser.add_argument("--batch_size", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    add_record_arguments(parser)
    return parser.parse_args()


class Scored:
    """A network on the images: `scores` with their labels, and `predictions`, the logarithms of its probabilities."""

    def __init__(self, network: nn.Module, images: FolderHeldOut, processes: Processes) -> None:
        rows: list[torch.Tensor] = []
        watch = network.register_forward_hook(lambda _, __, output: rows.append(output.detach().cpu().double()))
        try:
            self.scores = evaluate_module(network, images, processes)
        finally:
            watch.remove()
        self.predictions = torch.cat(rows).log_softmax(dim=1)

    @property
    def top1(self) -> float:
        return 100 * self.scores.accuracy.top1

    def divergence(self, other: Scored) -> float:
        """The mean over images of sum p log(p / q), with q of the other."""
        return float((self.predictions.exp() * (self.predictions - other.predictions)).sum(dim=1).mean())

    def agreement(self, other: Scored) -> float:
        """The share of images of which both say the same, in percent."""
        return 100 * float((self.predictions.argmax(1) == other.predictions.argmax(1)).double().mean())


def main() -> None:
    arguments = parsed()
    device = choose_device(arguments.device)
    processes = Processes(device=device)
    notes = [f"On {describe_device(device)}; calibrated on {arguments.calibration} images."]
    record = Record.begin("torch_ptq", arguments, HEADER, notes)
    with tempfile.TemporaryDirectory() as folder:
        for name, given in (("calib", arguments.calib), ("val", arguments.val)):
            Path(folder, name).symlink_to((arguments.data / given).resolve(), target_is_directory=True)
        folders = open_folders(Path(folder))
        calibration, judged = (
            FolderHeldOut(images.some(count), arguments.batch_size, SIZE, 0, processes)
            for images, count in (
                (folders.calibration, arguments.calibration),
                (folders.held_out, arguments.images),
            )
        )
        network = load_network(arguments.model, arguments.weights).to(device)
        before = Scored(network, judged, processes)
        for name in arguments.recipes:
            began = time.perf_counter()
            quantized = ModelQuantizer(RECIPES[name]()).quantize_model(network, calibration).to(device)
            minutes = (time.perf_counter() - began) / 60
            after = Scored(quantized, judged, processes)
            pair = before.scores.paired_with(after.scores)
            drop = f"({100 * pair.top1_difference:+.2f} ± {100 * pair.standard_error:.2f})"
            kl, agreement = before.divergence(after), before.agreement(after)
            cells = [
                f"{before.top1:.2f}",
                f"{after.top1:.2f} {drop}",
                f"{agreement:.1f}",
                f"{kl:.4f}",
                f"{minutes:.1f}",
            ]
            row = [arguments.model, name, str(before.scores.accuracy.count), *cells]
            say(" ".join(row))
            figures = {"float_top1": before.top1, "ptq_top1": after.top1, "agreement": agreement, "divergence": kl}
            record.add([row], {"method": name, **figures, "minutes": minutes})
    record.finish()


if __name__ == "__main__":
    main()
