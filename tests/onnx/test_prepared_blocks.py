"""Prepared block operators: the same bits as the operators that they stand for, with our library and without."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from backends import open_session
from onnx import TensorProto, helper, numpy_helper

from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS
from quark.inspect.inspection import inspect_model
from quark.onnx.convert.for_cpu import convert_for_cpu
from quark.onnx.file_graph import read_graph
from quark.onnx.plan_reader import read_plan
from quark.onnx.prepared_blocks import CPU_DOMAIN
from quark.ops.onnx_nodes import make_block_node
from quark.ops.portable_functions import add_portable_functions
from quark.ops.schema import DOMAIN

Array = np.ndarray[Any, Any]

STEPS = ("Min", "Pad", "Sub")
RNG = np.random.default_rng(5)


def chain(
    quantizer: BlockQuantizer, steps: tuple[str, ...], shape: tuple[int, ...], pads: tuple[int, ...] = (1, 2, 3, 0)
) -> onnx.ModelProto:
    """Neg, these operators, the quantizer and a convolution of one value per output."""
    channels = shape[1]
    arrays = {
        "bounds": (0.5 + RNG.random((channels, 1, 1))).astype(np.float32),
        "pads": np.array([0, 0, pads[0], pads[1], 0, 0, pads[2], pads[3]], np.int64),
        "centers": RNG.standard_normal((1, channels, 1, 1)).astype(np.float32),
        "w": RNG.standard_normal((3, channels, 1, 1)).astype(np.float32),
    }
    nodes, value, size = [helper.make_node("Neg", ["x"], ["n"])], "n", list(shape)
    infos = [helper.make_tensor_value_info("n", TensorProto.FLOAT, shape)]
    for step, name in zip(STEPS, ("bounds", "pads", "centers"), strict=True):
        if step in steps:
            nodes.append(helper.make_node(step, [value, name], [step.lower()]))
            value = step.lower()
            if step == "Pad":
                size[2:] = [size[2] + pads[0] + pads[2], size[3] + pads[1] + pads[3]]
            infos.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, size))
    nodes.append(make_block_node(quantizer, 1, value, "q", "quantizer"))
    nodes.append(helper.make_node("Conv", ["q", "w"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "q")],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
        value_info=infos,
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return add_portable_functions(helper.make_model(graph, opset_imports=imports, ir_version=9))


def run(model: onnx.ModelProto, x: Array, native: bool) -> list[bytes]:
    return [np.asarray(y).tobytes() for y in open_session(model, native).run(None, {"x": x})]


def operators(model: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in model.graph.node]


CHAINS = [("Min",), ("Sub",), ("Pad",), ("Pad", "Sub"), ("Min", "Sub"), STEPS]


@pytest.mark.parametrize("steps", CHAINS, ids="-".join)
def test_prepared_operators_compute_the_same_bits_of_a_chain(steps: tuple[str, ...]) -> None:
    for fmt, shape in product(BLOCK_FORMATS, [(2, 40, 7, 7), (1, 35, 1, 1), (1, 32, 30, 33)]):
        model = chain(BlockQuantizer(fmt), steps, shape)
        converted = convert_for_cpu(model)
        kept = [op_type for domain, op_type in operators(converted) if not domain]
        assert kept == ["Neg", "Conv"], fmt
        assert CPU_DOMAIN in {domain for domain, _ in operators(converted)}
        x = RNG.standard_normal(shape).astype(np.float32)
        x[0, 3] = np.nan
        x[0, 2, 0, 0] = -np.inf
        expected = run(model, x, native=True)
        assert run(converted, x, native=True) == expected, (fmt, shape)
        if fmt.block_size == 16:
            assert run(converted, x, native=False) == run(model, x, native=False), (fmt, shape)


def test_pads_of_every_side() -> None:
    quantizer = BlockQuantizer(next(fmt for fmt in BLOCK_FORMATS if str(fmt) == "nvfp4"))
    for pads in ((1, 1, 1, 1), (0, 0, 1, 1), (2, 0, 0, 0), (0, 3, 0, 0), (0, 0, 0, 5), (0, 0, 4, 0)):
        model = chain(quantizer, STEPS, (1, 20, 5, 6), pads)
        x = RNG.standard_normal((1, 20, 5, 6)).astype(np.float32)
        assert run(convert_for_cpu(model), x, native=True) == run(model, x, native=True), pads


def test_a_file_is_read_as_if_nothing_had_been_prepared(tmp_path: Path) -> None:
    quantizer = BlockQuantizer(BLOCK_FORMATS[0])
    model = chain(quantizer, STEPS, (1, 40, 6, 6))
    converted = convert_for_cpu(model)
    read = [(node.domain, node.op_type) for node in read_graph(converted).graph]
    assert read == operators(model)
    quantized = []
    for each in (model, converted):
        onnx.save(each, tmp_path / "net.onnx")
        quantized.append(inspect_model(tmp_path / "net.onnx").quantized)
    assert quantized[0] == quantized[1]
    assert [each.tensor for each in read_plan(converted)] == [each.tensor for each in read_plan(model)]
    assert operators(convert_for_cpu(converted)) == operators(converted)


def test_what_others_read_stays() -> None:
    model = chain(BlockQuantizer(BLOCK_FORMATS[0]), ("Min", "Sub"), (1, 40, 6, 6))
    model.graph.output.append(helper.make_tensor_value_info("min", TensorProto.FLOAT, None))
    converted = convert_for_cpu(model)
    assert [op_type for domain, op_type in operators(converted) if not domain] == ["Neg", "Min", "Conv"]
    x = RNG.standard_normal((1, 40, 6, 6)).astype(np.float32)
    assert run(converted, x, native=True) == run(model, x, native=True)


def test_what_the_operator_cannot_do_is_left_alone() -> None:
    model = chain(BlockQuantizer(BLOCK_FORMATS[0]), ("Pad",), (1, 40, 6, 6))
    next(node for node in model.graph.node if node.op_type == "Pad").attribute.append(
        helper.make_attribute("mode", "edge")
    )
    assert operators(convert_for_cpu(model)) == operators(model)


def test_wrong_inputs_are_errors() -> None:
    model = convert_for_cpu(chain(BlockQuantizer(BLOCK_FORMATS[0]), STEPS, (1, 40, 6, 6)))
    name = next(each.name for each in model.graph.initializer if each.name.endswith("pads"))
    tensor = next(each for each in model.graph.initializer if each.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.array([0, 1, 0, 0, 0, 0, 0, 0], np.int64), name))
    session = open_session(model, native=True)
    with pytest.raises(Exception, match="pads.*expected 8 of at least 0, with zeros for batch and channels"):
        session.run(None, {"x": np.zeros((1, 40, 6, 6), np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["avx2", "baseline"])
def test_other_instruction_sets_compute_the_same_bits(instructions: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "compute_the_same_bits_of_a_chain or every_side"]
    environment = {**os.environ, "QUARK_INSTRUCTION_SET": instructions}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
