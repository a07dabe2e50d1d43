"""What runs in the interpreter that has AMD Quark: quantizes a network there, and runs files with its operators.

    PYTHON peer_process.py FOLDER PRESET ...

FOLDER holds float.onnx, samples.npz (one array a sample, for the lone input) and ours/*.onnx. Added are
theirs/PRESET.onnx and, beside every file of both folders, its outputs as .npy.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

from quark.onnx import ModelQuantizer, get_library_path
from quark.onnx.quantization.config import Config, get_default_config


class Reader:
    def __init__(self, name, samples):
        self.feeds = iter([{name: sample} for sample in samples])

    def get_next(self):
        return next(self.feeds, None)


def session_of(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(get_library_path("CPU"))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main(folder, presets):
    samples = list(np.load(folder / "samples.npz").values())
    name = onnxruntime.InferenceSession(str(folder / "float.onnx")).get_inputs()[0].name
    for preset in presets:
        quantizer = ModelQuantizer(Config(global_quant_config=get_default_config(preset)))
        target = folder / "theirs" / f"{preset}.onnx"
        quantizer.quantize_model(str(folder / "float.onnx"), str(target), Reader(name, samples))
    for path in [*folder.glob("ours/*.onnx"), *folder.glob("theirs/*.onnx")]:
        session = session_of(path)
        np.save(path.with_suffix(".npy"), np.stack([session.run(None, {name: sample})[0] for sample in samples]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
