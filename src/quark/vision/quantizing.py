"""From the float weights of an image classifier to an ONNX file.

    load -> evaluate -> quantize -> evaluate -> [train -> evaluate] -> freeze -> export -> evaluate the file

All evaluations use the same held-out images, so that their differences are paired. With torchrun each process takes
its part of the images, and the first one exports.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from quark.account import FileFacts
from quark.card import Card, DataKind
from quark.errors import InvalidValueError
from quark.evaluate import Dataset, Network
from quark.evaluate.evaluation import ranked
from quark.evaluate.network import as_scores
from quark.onnx.data.images import find_preprocessing, image_loader
from quark.onnx.quantization.making import FoundCard
from quark.onnx.quantization.reproduction import Reproduction
from quark.torch import ModelQuantizer, export_onnx, simulate_runtime
from quark.torch.export.exporter import record_paths
from quark.torch.export.reproduction import rebuilt
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.named_specs import FP8E4M3PerChannelSpec, FP8E4M3PerTensorSpec, Int4PerGroupSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer import (
    LSQObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    PerTensorMinMaxObserver,
    PerTensorMovingAverageMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPowOf2MinMSEObserver,
    PerTensorPowOf2NonOverflowObserver,
    TQTObserver,
)
from quark.torch.runtime import RuntimeNetwork
from quark.torch.train.networks import QuantizedNetwork
from quark.vision.data import FolderBatches, FolderHeldOut, LabelledImages, open_folders
from quark.vision.data.folders import TrainingTransform
from quark.vision.networks import load_network
from quark.vision.tensor_file import LAST, load_checkpoint
from quark.vision.training import (
    EpochResult,
    Processes,
    Scores,
    Trainer,
    TrainingOptions,
    TrainingResult,
    choose_device,
    evaluate_module,
)

__all__ = [
    "ClassifierQuantization",
    "ImageOptions",
    "Listener",
    "Measured",
    "QuantizedClassifier",
    "evaluate_file",
    "quantize_classifier",
    "reproduce_classifier",
]

CHECKPOINTS = "checkpoints"
EXAMPLES = 4  # images on which the file is compared with torch


class Method(str, Enum):
    """How scales are found.

    float_scale      activations: one scale per tensor, with a zero point, so that all codes are used after a ReLU, for
                     the average of the samples' ranges; weights: one scale per output channel; biases: int32
    powers of two    one scale per tensor for everything, as AMD's NPU requires
      mse_powof2       the least squared error
      non_overflow     the smallest without clipping
      tqt              learned, as a threshold in the log domain (arXiv 1903.08066)
    lsq              learned float scales (arXiv 1902.08153)
    """

    FLOAT_SCALE = "float_scale"
    MSE_POWOF2 = "mse_powof2"
    NON_OVERFLOW = "non_overflow"
    TQT = "tqt"
    LSQ = "lsq"


class Precision(str, Enum):
    """Numbers of activations and weights. With 16-bit activations, biases have 32 bits.

    a8w4     4-bit weights in groups of 32 input channels, which have a scale each
    fp8      8-bit floats (E4M3), scales as with float_scale
    nvfp4    4-bit floats in blocks of 16
    """

    A8W8 = "a8w8"
    A16W8 = "a16w8"
    A8W4 = "a8w4"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


OBSERVERS: Mapping[Method, type[ObserverBase]] = {
    Method.FLOAT_SCALE: PerTensorMovingAverageMinMaxObserver,
    Method.MSE_POWOF2: PerTensorPowOf2MinMSEObserver,
    Method.NON_OVERFLOW: PerTensorPowOf2NonOverflowObserver,
    Method.TQT: TQTObserver,
    Method.LSQ: LSQObserver,
}
# biases are not learned
BIAS_OBSERVERS: Mapping[Method, type[ObserverBase]] = {**OBSERVERS, Method.TQT: PerTensorPowOf2MinMSEObserver}
LEARNING = (Method.TQT, Method.LSQ)


def recipe(method: Method = Method.FLOAT_SCALE, precision: Precision = Precision.A8W8) -> Config:
    """Return the configuration for a method and a precision."""
    if precision not in (Precision.A8W8, Precision.A16W8) and method is not Method.FLOAT_SCALE:
        raise InvalidValueError(
            f"{method.value} with {precision.value}: only 8-bit weights have such scales; leave one of the two out"
        )
    if precision is Precision.NVFP4:
        blocks = QuantizationSpec(Dtype.nvfp4)
        return Config(QuantizationConfig(input_tensors=blocks, weight=blocks))
    if precision is Precision.FP8:
        tensors, channels = FP8E4M3PerTensorSpec(), FP8E4M3PerChannelSpec(ch_axis=0)
        specs = {"input_tensors": tensors.to_quantization_spec(), "weight": channels.to_quantization_spec()}
        return Config(QuantizationConfig(**specs))
    is_wide = precision is Precision.A16W8
    activation = QuantizationSpec(
        Dtype.int16 if is_wide else Dtype.int8,
        # 16 bits have room for everything, and what an average clips would be most of their error
        PerTensorMSEObserver if is_wide and method is Method.FLOAT_SCALE else OBSERVERS[method],
        qscheme=QSchemeType.per_tensor,
        symmetric=method is not Method.FLOAT_SCALE,
    )
    weight = QuantizationSpec(Dtype.int8, OBSERVERS[method], qscheme=QSchemeType.per_tensor, symmetric=True)
    if method is Method.FLOAT_SCALE:
        weight = QuantizationSpec(
            Dtype.int8, PerChannelMinMaxObserver, qscheme=QSchemeType.per_channel, ch_axis=0, symmetric=True
        )
    if precision is Precision.A8W4:
        weight = Int4PerGroupSpec(ch_axis=1, group_size=32, symmetric=True).to_quantization_spec()
    if method in (Method.FLOAT_SCALE, Method.LSQ) or is_wide:
        bias = QuantizationSpec(Dtype.int32, PerTensorMinMaxObserver, symmetric=True)
    else:
        bias = QuantizationSpec(Dtype.int8, BIAS_OBSERVERS[method], qscheme=QSchemeType.per_tensor, symmetric=True)
    return Config(QuantizationConfig(activation, activation, weight, bias))


@dataclass(frozen=True)
class ImageOptions:
    """The images to use, and how to load them. `calibration` and `evaluation` are counts; None is all."""

    size: int = 224
    batch_size: int = 32
    workers: int = 2
    calibration: int | None = 500
    evaluation: int | None = None


@dataclass(frozen=True)
class ClassifierQuantization:
    """A quantization of a classifier. Without `training`, the network is only calibrated. The ONNX file and the
    checkpoints of training are written to `export_dir`. With `simulates_runtime`, the quantized network is trained and
    evaluated with the arithmetic of ONNX Runtime's integer kernels."""

    model_name: str
    pretrained: Path
    data_dir: Path
    export_dir: Path
    method: Method = Method.FLOAT_SCALE
    precision: Precision = Precision.A8W8
    images: ImageOptions = field(default_factory=ImageOptions)
    training: TrainingOptions | None = None
    is_exported: bool = False
    resumes: bool = False
    simulates_runtime: bool = False

    def options(self) -> dict[str, Any]:
        """Return the options of `quark quantize-torch` that the exported bytes depend on, except for paths."""
        images, training = self.images, self.training
        options: dict[str, Any] = {"model_name": self.model_name, "model_export": "onnx"}
        options |= {} if self.method is Method.FLOAT_SCALE else {self.method.value: True}
        options |= {} if self.precision is Precision.A8W8 else {self.precision.value: True}
        options |= {"simulate_runtime": self.simulates_runtime, "batch_size": images.batch_size}
        options |= {"image_size": images.size, "calibration_images": images.calibration}
        if training is not None:
            rates = ("learning_rate", "threshold_learning_rate", "weight_decay", "label_smoothing", "distillation")
            names = ("epochs", *rates, "patience", "clip_norm", "seed")
            options |= {"qat": True, "optimizer": training.optimizer.value, "compile": training.compiles}
            options |= {name: getattr(training, name) for name in names}
            options |= {
                "ema": training.average_decay,
                "freeze_bn": training.batch_norm_share,
                "limit": images.evaluation,
            }
            options |= {"autocast": None if training.autocast is None else training.autocast.value}
        return {name: value for name, value in options.items() if value is not None and value is not False}


@dataclass(frozen=True)
class Measured:
    """One form of the network and its scores."""

    name: str
    scores: Scores


@dataclass(frozen=True)
class QuantizedClassifier:
    """`module` is the network after calibration or training, `path` the ONNX file if it was exported."""

    module: nn.Module
    measured: tuple[Measured, ...]
    training: TrainingResult | None = None
    path: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Listener:
    """Callbacks for each form of the network that was evaluated, and for each epoch."""

    measured: Callable[[Measured], None] = lambda _: None
    epoch: Callable[[EpochResult], None] = lambda _: None


def quantize_classifier(
    request: ClassifierQuantization, processes: Processes | None = None, listener: Listener | None = None
) -> QuantizedClassifier:
    """Run the steps in the order above. Mistakes in the request are found before the work."""
    return _Run(request, processes or Processes(), listener or Listener()).run()


class _Run:
    def __init__(self, request: ClassifierQuantization, processes: Processes, listener: Listener) -> None:
        self.request, self.processes, self.listener = request, processes, listener
        self.folders = open_folders(request.data_dir)
        self.data = None if request.training is None else self._training_data(request.training.seed)
        if request.resumes and processes.is_first:
            load_checkpoint(self._checkpoints / LAST)
        self.judged = self.folders.held_out.some(request.images.evaluation)
        self.measured: list[Measured] = []

    def quantized(self) -> QuantizedNetwork:
        """Return the network that would be exported; it is evaluated only if training needs that."""
        source = load_network(self.request.model_name, self.request.pretrained).to(self.processes.device)
        quantized = self._quantized(source)
        if self.request.training is not None and self.data is not None:
            start = self._measure("PTQ", quantized)
            self._train(quantized, source, start, self.request.training, self.data)
        network = quantized.network if isinstance(quantized, RuntimeNetwork) else quantized
        assert isinstance(network, QuantizedNetwork)
        return network

    def run(self) -> QuantizedClassifier:
        network = load_network(self.request.model_name, self.request.pretrained).to(self.processes.device)
        self._measure("float", network)
        quantized = self._quantized(network)
        start = self._measure("PTQ", quantized)
        training = None
        if self.request.training is not None and self.data is not None:
            training = self._train(quantized, network, start, self.request.training, self.data)
            self._measure("QAT", quantized)
        path = self._export(quantized) if self.request.is_exported else None
        return QuantizedClassifier(quantized, tuple(self.measured), training, path, self._notes(network))

    def _measure(self, name: str, module: nn.Module) -> Scores:
        return self._found(name, evaluate_module(module, self._held_out(self.judged), self.processes))

    def _found(self, name: str, scores: Scores) -> Scores:
        self.measured.append(Measured(name, scores))
        self.listener.measured(self.measured[-1])
        return scores

    def _quantized(self, network: nn.Module) -> QuantizedNetwork | RuntimeNetwork:
        """Return a new module; the float network is not changed, since training may need it."""
        images = self.folders.calibration.some(self.request.images.calibration)
        config = recipe(self.request.method, self.request.precision)
        quantized: QuantizedNetwork = ModelQuantizer(config).quantize_model(network, self._held_out(images))
        origin, folder = quantized.origin, self.request.data_dir
        assert origin is not None
        data = replace(origin.data, kind=DataKind.FOLDER, name=folder.resolve().name)
        quantized.origin = replace(
            origin,
            source=weights_facts(self.request.pretrained),
            data=data,
            unkept=("torchrun",) if self.processes.are_many else (),
            request=self.request.options(),
        )
        quantized.to(self.processes.device)
        self.processes.follow_first(quantized.state_dict().values())
        return simulate_runtime(quantized) if self.request.simulates_runtime else quantized

    def _training_data(self, seed: int) -> FolderBatches:
        images, sizes = self.folders.training, self.request.images
        if images is None:
            raise InvalidValueError(
                f"data '{self.request.data_dir}' has only images for evaluation: training needs others, in a "
                f"folder train or calib beside val"
            )
        transform = TrainingTransform(sizes.size)
        data = FolderBatches(images, sizes.batch_size, transform, seed, sizes.workers, self.processes)
        if not len(data):
            raise InvalidValueError(
                f"{len(images)} images in '{images.source}' make no batch of {sizes.batch_size} for each of "
                f"{self.processes.count} processes: give a smaller batch size, or more images"
            )
        return data

    def _train(
        self,
        quantized: nn.Module,
        network: nn.Module,
        start: Scores,
        options: TrainingOptions,
        data: FolderBatches,
    ) -> TrainingResult:
        teacher = network if options.distillation else None
        trainer = Trainer(quantized, options, self._checkpoints, self.processes, teacher, self.listener.epoch)
        return trainer.train(data, self._held_out(self.judged), start, self.request.resumes)

    @property
    def _checkpoints(self) -> Path:
        return self.request.export_dir / CHECKPOINTS

    def _export(self, quantized: nn.Module) -> Path | None:
        """Freeze and export in the first process; the others wait, so that none ends the run before."""
        path = None
        if self.processes.is_first:
            folder = self.request.export_dir
            images = self.folders.calibration.some(EXAMPLES)
            example, _ = next(iter(FolderHeldOut(images, EXAMPLES, self.request.images.size)))
            parts = (self.request.model_name, self.request.method.value, self.request.precision.value)
            path = export_onnx(quantized, folder, example, file_name=f"{'_'.join(parts)}.onnx").path
            record_paths(path, self.request.pretrained, self.request.data_dir)
            self._found("ONNX", evaluate_file(path, self.judged))
        self.processes.wait()
        return path

    def _held_out(self, images: LabelledImages) -> FolderHeldOut:
        sizes = self.request.images
        return FolderHeldOut(images, sizes.batch_size, sizes.size, sizes.workers, self.processes)

    def _notes(self, network: nn.Module) -> tuple[str, ...]:
        """Return reasons to doubt the figures."""
        notes = []
        classes = list(network.state_dict().values())[-1].shape[0]
        if len(self.folders.classes) != classes:
            notes.append(
                f"the data has {len(self.folders.classes)} classes and the network {classes}: the first folder counts "
                f"as class 0, the next as class 1, and so on, unless classes.txt names them"
            )
        if self.folders.is_calibrated_on_held_out:
            notes.append(
                "calibrated on the evaluation images, which flatters the result; put other images into calib or train"
            )
        elif self.request.method in LEARNING and self.request.training is None:
            notes.append(f"{self.request.method.value} learns in training: --qat trains")
        return tuple(notes)


def reproduce_classifier(
    found_card: FoundCard, request: ClassifierQuantization, output: str | os.PathLike[str] | None = None
) -> Reproduction:
    """Do what the request says again, training included, and compare the file with that of the card."""
    weights = weights_facts(request.pretrained)
    if weights.sha256 != found_card.card.source.sha256:
        raise InvalidValueError(
            f"weights '{request.pretrained}' are not the card's: SHA-256 {weights.sha256[:16]}, expected "
            f"{found_card.card.source.sha256[:16]}"
        )

    def quantized(card: Card) -> QuantizedNetwork:
        network = _Run(request, Processes(device=choose_device()), Listener()).quantized()
        origin = network.origin
        assert origin is not None
        if origin.data.sha256 != card.data.sha256:
            raise InvalidValueError(f"the calibration images in '{request.data_dir}' are not the card's")
        return network

    return rebuilt(found_card, quantized, None, output, (request.pretrained, request.data_dir))


def weights_facts(path: Path) -> FileFacts:
    """Return name, size and hash of a file of weights."""
    with path.open("rb") as file:
        return FileFacts(path.name, path.stat().st_size, hashlib.sha256(file.read()).hexdigest())


def evaluate_file(path: Path, images: LabelledImages, batch_size: int = 10) -> Scores:
    """Return the scores of an ONNX file in ONNX Runtime, for the same images, prepared the same way."""
    network = Network(path)
    port = network.image_input
    loader = image_loader(port, find_preprocessing("imagenet"))
    labels = np.array(images.labels, np.int64)
    data = Dataset(images.source, len(images), labels, lambda number: {port.name: loader.load(images.files[number])})
    best = [ranked(as_scores(network.run(batch.inputs)[0], path)) for batch in data.batches(batch_size)]
    return Scores(np.concatenate(best), labels)
