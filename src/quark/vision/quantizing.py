"""An image classifier from its float weights to an ONNX file: calibrated, trained where asked for, and measured.

    load -> evaluate -> quantize -> evaluate -> [train -> evaluate] -> freeze -> export -> evaluate the file

All figures are of the same held-out images, so that their differences are paired. Under torchrun each process takes
its part of the images, and the first one exports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import nn

from quark.errors import InvalidValueError
from quark.evaluate import Dataset, Network
from quark.evaluate.accuracy import ranked
from quark.evaluate.network import as_scores
from quark.onnx.data.images import find_preprocessing, image_loader
from quark.onnx.save import writing
from quark.torch import ModelQuantizer, export_onnx
from quark.vision.data import FolderBatches, FolderHeldOut, LabelledImages, open_folders
from quark.vision.data.augmentation import TrainingTransform
from quark.vision.networks import load_network
from quark.vision.recipes import LEARNING, Method, Precision, recipe
from quark.vision.training import (
    EpochResult,
    Processes,
    Scores,
    Trainer,
    TrainingOptions,
    TrainingResult,
    evaluate_module,
)
from quark.vision.training.checkpoint import LAST, load_checkpoint

CHECKPOINTS = "checkpoints"
EXAMPLES = 4  # images that the file is compared with torch on


@dataclass(frozen=True)
class ImageOptions:
    """Which images, and how they come. `calibration` and `evaluation` are counts; None takes all."""

    size: int = 224
    batch_size: int = 32
    workers: int = 2
    calibration: int | None = 500
    evaluation: int | None = None


@dataclass(frozen=True)
class ClassifierQuantization:
    """What is asked for. `training` None leaves it at calibrating; `export_dir` gets the ONNX file, and the
    checkpoints of training."""

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


@dataclass(frozen=True)
class Measured:
    """One form of the network, and how it scores."""

    name: str
    scores: Scores


@dataclass(frozen=True)
class QuantizedClassifier:
    """What came out; `module` is the network after calibrating or training, `path` the ONNX file where there is one."""

    module: nn.Module
    measured: tuple[Measured, ...]
    training: TrainingResult | None = None
    path: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Listener:
    """Who is told meanwhile: of each form of the network that was measured, and of each epoch."""

    measured: Callable[[Measured], None] = lambda _: None
    epoch: Callable[[EpochResult], None] = lambda _: None


def quantize_classifier(
    request: ClassifierQuantization, processes: Processes | None = None, listener: Listener | None = None
) -> QuantizedClassifier:
    """All of it, in the order of the text above. What can be found wrong before the work is found before it."""
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

    def _quantized(self, network: nn.Module) -> nn.Module:
        """Another module: the float network is left as it is, and training may learn from it."""
        images = self.folders.calibration.some(self.request.images.calibration)
        config = recipe(self.request.method, self.request.precision)
        quantized = ModelQuantizer(config).quantize_model(network, self._held_out(images)).to(self.processes.device)
        self.processes.follow_first(quantized.state_dict().values())
        return quantized

    def _training_data(self, seed: int) -> FolderBatches:
        images, sizes = self.folders.training, self.request.images
        if images is None:
            raise InvalidValueError(
                f"data '{self.request.data_dir}' has images to judge by alone: training needs others, in a folder "
                f"train or calib beside val"
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
        """Frozen and written by the first process; the others wait, so that none ends the run before that."""
        path = None
        if self.processes.is_first:
            folder = self.request.export_dir
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            images = self.folders.calibration.some(EXAMPLES)
            example, _ = next(iter(FolderHeldOut(images, EXAMPLES, self.request.images.size)))
            parts = (self.request.model_name, self.request.method.value, self.request.precision.value)
            path = export_onnx(quantized, example, folder / f"{'_'.join(parts)}.onnx").path
            self._found("ONNX", evaluate_file(path, self.judged))
        self.processes.wait()
        return path

    def _held_out(self, images: LabelledImages) -> FolderHeldOut:
        sizes = self.request.images
        return FolderHeldOut(images, sizes.batch_size, sizes.size, sizes.workers, self.processes)

    def _notes(self, network: nn.Module) -> tuple[str, ...]:
        """What makes the figures doubtful."""
        notes = []
        classes = list(network.state_dict().values())[-1].shape[0]
        if len(self.folders.classes) != classes:
            notes.append(
                f"the data has {len(self.folders.classes)} classes and the network {classes}: the first folder counts "
                f"as class 0, the next as class 1, and so on, unless classes.txt names them"
            )
        if self.folders.is_calibrated_on_held_out:
            notes.append("calibrated on the images that were judged by, which flatters; put others into calib or train")
        elif self.request.method in LEARNING and self.request.training is None:
            notes.append(f"{self.request.method.value} learns in training: --qat trains")
        return tuple(notes)


def evaluate_file(path: Path, images: LabelledImages, batch_size: int = 10) -> Scores:
    """The scores of an ONNX file, by ONNX Runtime, for the same images and with the same preparation."""
    network = Network(path)
    port = network.image_input
    loader = image_loader(port, find_preprocessing("imagenet"))
    labels = np.array(images.labels, np.int64)
    data = Dataset(images.source, len(images), labels, lambda number: {port.name: loader.load(images.files[number])})
    best = [ranked(as_scores(network.run(batch.inputs)[0], path)) for batch in data.batches(batch_size)]
    return Scores(np.concatenate(best), labels)


__all__ = [
    "ClassifierQuantization",
    "ImageOptions",
    "Listener",
    "Measured",
    "QuantizedClassifier",
    "evaluate_file",
    "quantize_classifier",
]
