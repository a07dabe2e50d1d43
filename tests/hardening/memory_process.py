"""One kind of work a number of times; what the process holds after each is printed, in MB.

    python memory_process.py KIND RUNS FOLDER

Garbage is collected and freed memory handed back before looking, so that only what is kept counts.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quark.demo import network_path
from quark.demo.digits import load_digits


def samples() -> list[np.ndarray]:
    train, _ = load_digits()
    return [image[None] for image in train.images[:8]]


def quantizing(preset: str, folder: Path) -> Callable[[], object]:
    from quark.onnx import quantize

    feeds = samples()
    return lambda: quantize(network_path(), feeds, preset).save(folder / "quantized.onnx")


def packing(folder: Path) -> Callable[[], object]:
    from quark.onnx import quantize

    result = quantize(network_path(), samples(), "MXFP4E2M1")
    return lambda: result.save(folder / "packed.onnx", pack="portable")


def evaluating(folder: Path) -> Callable[[], object]:
    from quark.evaluate import Network, evaluate, open_dataset

    _, test = load_digits()
    archive = folder / "digits.npz"
    np.savez(archive, images=test.images, labels=test.labels)

    def run() -> None:
        network = Network(network_path())
        evaluate(network, open_dataset(archive, network))

    return run


def torch_road(folder: Path) -> Callable[[], object]:
    import torch

    from quark.torch import ModelExporter, ModelQuantizer
    from quark.torch.export.config.config import ExporterConfig, JsonExporterConfig
    from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
    from quark.torch.quantization.config.type import Dtype

    torch.set_num_threads(1)
    int8 = QuantizationSpec(Dtype.int8)
    config = Config(global_quant_config=QuantizationConfig(input_tensors=int8, output_tensors=int8, weight=int8))
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)
    model, images = torch.nn.Sequential(*layers).eval(), torch.rand(4, 3, 8, 8)

    def run() -> None:
        quantizer = ModelQuantizer(config)
        frozen = quantizer.freeze(quantizer.quantize_model(model, [images]))
        exporter = ModelExporter(ExporterConfig(json_export_config=JsonExporterConfig()), folder)
        exporter.export_onnx_model(frozen, images[:1])

    return run


def held_mb() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main(kind: str, runs: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    name, _, preset = kind.partition(" ")
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "quantize": lambda: quantizing(preset, folder),
        "pack": lambda: packing(folder),
        "evaluate": lambda: evaluating(folder),
        "torch": lambda: torch_road(folder),
    }
    run = makers[name]()
    for _ in range(runs):
        run()
        sys.stdout.write(f"{held_mb():.2f}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
