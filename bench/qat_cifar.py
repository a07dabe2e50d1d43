"""Quantization-aware training of ResNet-20 on CIFAR-10: the accuracy of each method, and the minutes it takes.

    python -m bench.qat_cifar --data cifar10.npz --weights resnet20.th --method tqt --method lsq4 --device cuda

    tqt      int8, power-of-two scales, learned thresholds: what an NPU takes
    lsq8     int8, learned steps
    lsq4     4 bits for weights and activations, learned steps; 8 bits in the first and last layer, as in the paper
    mxfp4    MXFP4 for both operands of every product
    mxfp4_wide_ends   the same, with MXFP8 E4M3 in the first and last layer (`keep_first_last`), and weight scales of
             least squared error
    nvfp4    NVFP4 for both operands of every product
    mx6      MX6 likewise
    fixed4   4 bits as in lsq4, with fixed scales of least squared error and compensation (GPTQ)
    fixed4_uncompensated    the same without compensation: training starts from the float weights

The archive has train_x, train_y, test_x and test_y, the images as uint8 [n, 32, 32, 3]. Images are kept on the device
and augmented there, so reading them takes no time. The epoch to keep is chosen on training images that are not trained
on, the last `HELD_OUT_IMAGES`; test images are looked at once, at the end. `--held_out` reports on those training
images instead, to choose a recipe by. The float network knows them, so the accuracies are higher.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from bench.devices import describe_device
from bench.record import Record, add_record_arguments, say
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    BiasCorrectionConfig,
    Config,
    GPTQConfig,
    QuantizationConfig,
    QuantizationSpec,
)
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer import LSQObserver
from quark.torch.quantization.observer.observer import PerTensorMSEObserver
from quark.vision.data import ArrayBatches, ArrayHeldOut, Arrays
from quark.vision.networks import load_network
from quark.vision.quantizing import Method, recipe
from quark.vision.training import (
    Autocast,
    EpochResult,
    OptimizerName,
    Processes,
    Trainer,
    TrainingOptions,
    choose_device,
    evaluate_module,
)

CALIBRATION_IMAGES = 1000
HELD_OUT_IMAGES = 2000
TEST_BATCH = 500
HEADER = ("method", "float", "PTQ", "QAT", "QAT less float", "epochs", "minutes")


def _learned(dtype: Dtype) -> QuantizationSpec:
    # unsigned codes start at 0, as LSQ has them
    return QuantizationSpec(dtype, LSQObserver, qscheme=QSchemeType.per_tensor, symmetric=dtype.name.startswith("int"))


def lsq4() -> Config:
    """What layers read is behind a ReLU, and unsigned, but for the images."""
    first = QuantizationConfig(input_tensors=_learned(Dtype.int8), weight=_learned(Dtype.int8))
    last = QuantizationConfig(input_tensors=_learned(Dtype.uint8), weight=_learned(Dtype.int8))
    inner = QuantizationConfig(input_tensors=_learned(Dtype.uint4), weight=_learned(Dtype.int4))
    # products alone are quantized, as in the paper: sums of two branches have signs, and stay as they are
    return Config(
        QuantizationConfig(),
        algo_config=[],
        layer_type_quant_config={nn.Conv2d: inner},
        layer_quant_config={"conv1": first, "linear": last},
    )


def fixed4(*, is_compensated: bool) -> Config:
    """The types of `lsq4`, with scales that are not learned."""

    def layers(inputs: Dtype, weights: Dtype) -> QuantizationConfig:
        tensors = QuantizationSpec(inputs, PerTensorMSEObserver, symmetric=True)
        return QuantizationConfig(tensors, weight=QuantizationSpec(weights, PerTensorMSEObserver, symmetric=True))

    return Config(
        QuantizationConfig(),
        algo_config=[BiasCorrectionConfig(), *([GPTQConfig()] if is_compensated else [])],
        layer_type_quant_config={nn.Conv2d: layers(Dtype.uint4, Dtype.int4)},
        layer_quant_config={"conv1": layers(Dtype.int8, Dtype.int8), "linear": layers(Dtype.uint8, Dtype.int8)},
    )


def blocks(dtype: Dtype, weight_rule: str | None = None, ends: str | None = None) -> Config:
    """The same type for both operands; the rule is that for the scales of weights, the format's own where None. `ends`
    is the type of the first and the last layer, if they have another."""
    weight = QuantizationSpec(dtype, scale_calculation_mode=weight_rule)
    return Config(QuantizationConfig(QuantizationSpec(dtype), weight=weight), keep_first_last=ends)


@dataclass(frozen=True)
class Recipe:
    """A configuration, and how it is trained."""

    config: Callable[[], Config]
    options: TrainingOptions
    batch_size: int = 128
    is_augmented: bool = True


SGD = TrainingOptions(optimizer=OptimizerName.SGD, batch_norm_share=1.0)
DISTILLED = replace(SGD, distillation=0.9)  # the float network knows more than the labels
RECIPES = {
    "tqt": Recipe(lambda: recipe(Method.TQT), replace(DISTILLED, epochs=2, learning_rate=1e-3)),
    "lsq4": Recipe(lsq4, replace(DISTILLED, epochs=5, learning_rate=2e-2, threshold_learning_rate=5e-3)),
    "lsq8": Recipe(lambda: recipe(Method.LSQ), replace(DISTILLED, epochs=2, learning_rate=1e-3)),
    "nvfp4": Recipe(lambda: blocks(Dtype.nvfp4), replace(DISTILLED, epochs=10, learning_rate=1e-2)),
    "mxfp4": Recipe(lambda: blocks(Dtype.fp4), replace(DISTILLED, epochs=10, learning_rate=1e-2)),
    "mxfp4_wide_ends": Recipe(
        lambda: blocks(Dtype.fp4, "mse", "mxfp8_e4m3"), replace(DISTILLED, epochs=10, learning_rate=1e-2)
    ),
    **{
        name: Recipe(partial(fixed4, is_compensated=is_compensated), replace(DISTILLED, epochs=2, learning_rate=1e-3))
        for name, is_compensated in (("fixed4", True), ("fixed4_uncompensated", False))
    },
    "mx6": Recipe(lambda: blocks(Dtype.mx6), replace(DISTILLED, epochs=4, learning_rate=4e-3)),
}


@dataclass(frozen=True)
class Figure:
    """Accuracies in percent."""

    method: str
    float_top1: float
    ptq_top1: float
    qat_top1: float
    epochs: int
    minutes: float

    def cells(self) -> list[str]:
        shares = [f"{value:.2f}" for value in (self.float_top1, self.ptq_top1, self.qat_top1)]
        difference = f"{self.qat_top1 - self.float_top1:+.2f}"
        return [self.method, *shares, difference, str(self.epochs), f"{self.minutes:.1f}"]


@dataclass(frozen=True)
class Cifar:
    """The images on a device, and a float network that knows those of training."""

    training: Arrays
    held_out: Arrays
    test: Arrays
    network: nn.Module
    processes: Processes

    @classmethod
    def open(cls, data: Path, weights: Path, device: torch.device, images: int | None) -> Cifar:
        training, test = (Arrays.read(data, f"{part}_x", f"{part}_y") for part in ("train", "test"))
        trained = len(training) - HELD_OUT_IMAGES
        held_out = Arrays(training.images[trained:], training.labels[trained:])
        training = training.some(trained if images is None else min(images, trained))
        network = load_network("cifar_resnet20", weights).to(device)
        return cls(training.to(device), held_out.to(device), test.to(device), network, Processes(device=device))

    def measure(self, method: str, recipe: Recipe) -> Figure:
        """Calibrate, train, keep the epoch that is best on held-out images, and judge it by the test images."""
        held_out, test = ArrayHeldOut(self.held_out, TEST_BATCH), ArrayHeldOut(self.test, TEST_BATCH)
        before = evaluate_module(self.network, test, self.processes)
        calibration = ArrayHeldOut(self.training.some(CALIBRATION_IMAGES), TEST_BATCH)
        quantizer, options = ModelQuantizer(recipe.config()), recipe.options
        model = quantizer.quantize_model(self.network, calibration).to(self.processes.device)
        start = evaluate_module(model, test, self.processes)
        say(f"{method}: float {100 * before.accuracy.top1:.2f}, PTQ {100 * start.accuracy.top1:.2f}")
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            teacher = self.network if options.distillation else None
            trainer = Trainer(model, options, Path(folder), self.processes, teacher, _say_epoch)
            batches = ArrayBatches(self.training, recipe.batch_size, options.seed, is_augmented=recipe.is_augmented)
            trainer.train(batches, held_out)
        minutes = (time.perf_counter() - began) / 60
        after = evaluate_module(quantizer.freeze(model), test, self.processes)
        float_top1, ptq_top1, qat_top1 = (100 * value.accuracy.top1 for value in (before, start, after))
        return Figure(method, float_top1, ptq_top1, qat_top1, options.epochs, minutes)


def _say_epoch(result: EpochResult) -> None:
    if result.loss is not None:
        say(f"  epoch {result.epoch}: loss {result.loss:.4f}, top-1 {100 * result.top1:.2f}, {result.seconds:.0f} s")


def chosen_recipe(arguments: argparse.Namespace, method: str) -> Recipe:
    """That of the method, with what the command line says otherwise."""
    names = ("epochs", "learning_rate", "threshold_learning_rate", "distillation", "seed", "average_decay")
    changes = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.autocast:
        changes["autocast"] = Autocast.BFLOAT16
    recipe = RECIPES[method]
    batch_size = recipe.batch_size if arguments.batch_size is None else arguments.batch_size
    return replace(recipe, options=replace(recipe.options, **changes), batch_size=batch_size)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="cifar10.npz")
    parser.add_argument("--weights", type=Path, required=True, help="resnet20.th")
    parser.add_argument("--method", action="append", choices=list(RECIPES), help="all of them where not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--images", type=int, help="train on so many only")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--threshold_learning_rate", type=float)
    parser.add_argument("--distillation", type=float)
    parser.add_argument("--average_decay", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--held_out", action="store_true", help="report on held-out training images")
    parser.add_argument("--autocast", action="store_true", help="train in bfloat16 where torch can")
    add_record_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    device = choose_device(arguments.device)
    record = Record.begin("qat_cifar", arguments, HEADER, [f"Trained on {describe_device(device)}."])
    cifar = Cifar.open(arguments.data, arguments.weights, device, arguments.images)
    cifar = replace(cifar, test=cifar.held_out) if arguments.held_out else cifar
    for method in arguments.method or RECIPES:
        figure = cifar.measure(method, chosen_recipe(arguments, method))
        record.add([figure.cells()], figure)
    record.finish()


if __name__ == "__main__":
    main()
