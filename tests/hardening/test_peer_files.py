"""Files of AMD Quark run with our operators, and ours with theirs: the same outputs, bit for bit.

One thing differs, and is put aside where files of theirs are compared: their operators give a tensor of one element
back as it is, and ours quantize it like any other.

QUARK_PEER_PYTHON names an interpreter that has AMD Quark; without it nothing is compared. Both sides run with one
thread and without the runtime's rewrites, so that operators are all that can differ.
"""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_models import residual, transformer_block

from quark.onnx import get_default_config, get_library_path, quantize

THEIRS = ("XINT8", "A8W8", "MXINT8", "MXFP8E4M3", "MXFP4E2M1", "MX6", "MX9", "BFP16", "BF16")
OURS = (*THEIRS, "MXFP8E5M2", "MXFP6E3M2", "MXFP6E2M3", "MX4", "A16W8")
NETWORKS = {"residual": residual, "transformer": transformer_block}
PEER = os.environ.get("QUARK_PEER_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PEER is None, reason="QUARK_PEER_PYTHON names no interpreter with AMD Quark"),
]


def floor_config(preset: str):
    """The preset by the one scale rule that their operator knows, and without functions that could stand in for it."""
    config = get_default_config(preset)
    config.extra_options["PortableFunctions"] = False
    if "MXAttributes" in config.extra_options:
        config.extra_options["MXAttributes"]["scale_rule"] = "floor"
        config.extra_options.pop("WeightScaleRule", None)
    return config


@pytest.fixture(scope="module", params=NETWORKS)
def folder(request, tmp_path_factory):
    """A folder in which both sides have left their files, and they their outputs."""
    root = tmp_path_factory.mktemp(request.param)
    model = onnx.shape_inference.infer_shapes(NETWORKS[request.param]())
    for name in ("ours", "theirs"):
        (root / name).mkdir()
    onnx.save(model, root / "float.onnx")
    shape = [each.dim_value or 2 for each in model.graph.input[0].type.tensor_type.shape.dim]
    samples = np.random.default_rng(3).standard_normal((6, *shape)).astype(np.float32)
    np.savez(root / "samples.npz", *samples)
    for preset in OURS:
        quantize(root / "float.onnx", list(samples), floor_config(preset)).save(root / "ours" / f"{preset}.onnx")
    assert PEER is not None
    child = Path(__file__).with_name("peer_process.py")
    done = subprocess.run([PEER, str(child), str(root), *THEIRS], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return root


def our_outputs(path: Path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(get_library_path())
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    samples = np.load(path.parents[1] / "samples.npz").values()
    return np.stack([session.run(None, {session.get_inputs()[0].name: sample})[0] for sample in samples])


def without_lone_elements(path: Path) -> Path:
    """The file with nothing in the place of a block quantizer on a constant of one element."""
    model = onnx.load(path)
    lone = {tensor.name for tensor in model.graph.initializer if math.prod(tensor.dims) == 1}
    for node in model.graph.node:
        if node.op_type in ("MXQuantizeDequantize", "BFPQuantizeDequantize") and node.input[0] in lone:
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
    target = path.with_suffix(".without.onnx")
    onnx.save(model, target)
    return target


@pytest.mark.parametrize("preset", THEIRS)
def test_a_file_of_theirs_gives_the_same_with_our_operators(preset, folder):
    path = folder / "theirs" / f"{preset}.onnx"
    np.testing.assert_array_equal(our_outputs(without_lone_elements(path)), np.load(path.with_suffix(".npy")))


@pytest.mark.parametrize("preset", OURS)
def test_a_file_of_ours_gives_the_same_with_their_operators(preset, folder):
    path = folder / "ours" / f"{preset}.onnx"
    np.testing.assert_array_equal(our_outputs(path), np.load(path.with_suffix(".npy")))


@pytest.mark.parametrize("preset", ["MXINT8", "MXFP8E4M3", "MX6", "BFP16", "BF16"])
def test_the_files_have_nodes_of_the_domain(preset, folder):
    """Otherwise nothing would have been compared."""
    for side in ("ours", "theirs"):
        nodes = onnx.load(folder / side / f"{preset}.onnx").graph.node
        assert any(node.domain == "com.amd.quark" for node in nodes)
