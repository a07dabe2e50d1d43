"""Microsoft Olive's QuarkQuantization pass runs on this package as it is, from workflow files, by Olive's own command.

QUARK_OLIVE_PYTHON names an interpreter that has olive-ai and this package; without it nothing runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import quark.demo
from quark.compare.measures import sqnr_of, squared_sums
from quark.onnx import get_library_path

PYTHON = os.environ.get("QUARK_OLIVE_PYTHON")
MODEL = Path(quark.demo.__file__).with_name("digits_mobilenet.onnx")
INPUT, SHAPE = "input", (1, 8, 8)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PYTHON is None, reason="QUARK_OLIVE_PYTHON names no interpreter with olive-ai"),
]


def tensor(data_type: str, method: str = "MinMax", scale: str = "Float32", symmetric: bool = True) -> dict:
    return {"data_type": data_type, "calibration_method": method, "scale_type": scale, "symmetric": symmetric}


NPU = tensor("Int8", "MinMSE", "PowerOf2")
INTEGERS = {"activation": tensor("UInt8", symmetric=False), "weight": tensor("Int8")}
WIDER = {"activation": tensor("UInt16", symmetric=False), "weight": tensor("Int8")}
BLOCKS = {"activation": {"data_type": "BFP16"}, "weight": {"data_type": "BFP16"}}
CASES = {
    "layers with types of their own": (
        {
            "global_config": INTEGERS,
            "layer_type_config": [[WIDER, ["Add"]]],
            "specific_layer_config": [[{"activation": tensor("Int16"), "weight": tensor("Int16")}, ["stem.conv"]]],
            "exclude": ["^block1.*"],
            "algo_config": [{"name": "adaround", "num_iterations": 10, "data_size": 4, "lr_adjust": []}],
            "extra_options": {
                "TensorQuantOverrides": {"stage5.add.output": [{"quant_type": "BFloat16"}]},
            },
        },
        20,
        {"UINT8", "INT8", "UINT16", "INT16", "INT32", "BFLOAT16"},
    ),
    "powers of two": (
        {
            "global_config": {"activation": NPU, "weight": NPU},
            "algo_config": [{"name": "cle", "cle_steps": 2}],
            "extra_options": {"EnableNPUCnn": True},
            "data_config": "digits",
        },
        20,
        {"INT8"},
    ),
    "blocks": ({"global_config": BLOCKS, "data_config": "digits"}, 30, set()),
}


def samples() -> np.ndarray:
    return np.random.default_rng(3).random((8, *SHAPE), dtype=np.float32)


def workflow(folder: Path, options: dict) -> dict:
    """An Olive workflow of that pass alone, with calibration data from raw files."""
    (folder / "raw" / INPUT).mkdir(parents=True)
    for number, sample in enumerate(samples()):
        sample.tofile(folder / "raw" / INPUT / f"{number}.bin")
    dataset = {
        "data_dir": str(folder / "raw"),
        "input_names": [INPUT],
        "input_shapes": [list(SHAPE)],
        "input_types": ["float32"],
        "input_suffix": ".bin",
    }
    return {
        "input_model": {"type": "ONNXModel", "model_path": str(MODEL)},
        "data_configs": [
            {
                "name": "digits",
                "type": "RawDataContainer",
                "load_dataset_config": {"type": "raw_dataset", "params": dataset},
                "dataloader_config": {"params": {"batch_size": 2}},
            }
        ],
        "passes": {"quantize": {"type": "QuarkQuantization", **options}},
        "evaluate_input_model": False,
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "output"),
    }


def outputs(path: Path) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {INPUT: samples()})[0]


@pytest.mark.parametrize("name", CASES)
def test_the_pass_writes_a_network_that_runs(name, tmp_path):
    options, least_db, types = CASES[name]
    (tmp_path / "workflow.json").write_text(json.dumps(workflow(tmp_path, options)))
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-m", "olive", "run", "--config", "workflow.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OLIVE_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    written = list((tmp_path / "output").rglob("*.onnx"))
    assert (done.returncode, len(written)) == (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    graph = onnx.load(written[0]).graph
    assert {onnx.TensorProto.DataType.Name(each.data_type) for each in graph.initializer} - {"FLOAT"} == types
    assert types or any(node.op_type == "BFPQuantizeDequantize" for node in graph.node)
    assert sqnr_of(*squared_sums(outputs(MODEL), outputs(written[0]))) > least_db
