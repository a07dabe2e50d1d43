"""ONNX files that cost more than they should, and valid ones of kinds that cannot be quantized.

Every file costs bounded time and memory, whatever it claims to hold, and what cannot be quantized is refused before the
work: with a ModelError that names the file, and the node, tensor or limit.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from commands import assert_one_line_error, run
from onnx import TensorProto, helper, numpy_helper
from onnx_models import conv_bn_relu

from quark.errors import ModelError, QuarkError
from quark.evaluate import Network
from quark.onnx import quantize
from quark.onnx.lint import lint
from quark.onnx.load import load
from quark.onnx.load.source import read_source
from quark.onnx.load.wire import carve, head
from quark.onnx.pack import pack_model
from quark.onnx.session import open_session

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
MAY_TAKE_BYTES = 500 << 20
MAY_TAKE_SECONDS = 30  # 5 on a machine that does nothing else


def model_of(nodes, inputs, outputs, initializers=(), *, opset=17, functions=(), domains=()) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


def tensor_info(name: str, *shape: int | str, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def weight(name: str, *shape: int, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.random.default_rng(0).normal(size=shape).astype(dtype), name)


# --- millions of tiny fields -------------------------------------------------------------------------------------


def _inside(content: bytes, *numbers: int) -> bytes:
    """A model that holds these bytes in a field of a field ..., innermost first."""
    for number in numbers:
        content = head(number, len(content)) + content
    return b"\x08\x08\x42\x02\x10\x11" + content  # IR version 8, opset 17


GRAPH, NODE, ATTRIBUTE, TENSOR = (7,), (1, 7), (5, 1, 7), (5, 7)  # the numbers of the fields on the way there

TINY_FIELDS: dict[str, Callable[[int], bytes]] = {
    "nodes": lambda count: _inside(b"\x0a\0" * count, *GRAPH),
    "initializers": lambda count: _inside(b"\x2a\0" * count, *GRAPH),
    "inputs": lambda count: _inside(b"\x5a\0" * count, *GRAPH),
    "value infos": lambda count: _inside(b"\x6a\0" * count, *GRAPH),
    "attributes": lambda count: _inside(b"\x2a\0" * count, *NODE),
    "inputs of a node": lambda count: _inside(b"\x0a\0" * count, *NODE),
    "numbers of an attribute": lambda count: _inside(b"\x40\1" * count, *ATTRIBUTE),
    "packed numbers of an attribute": lambda count: _inside(b"\1" * 2 * count, 8, *ATTRIBUTE),
    "texts of an attribute": lambda count: _inside(b"\x4a\0" * count, *ATTRIBUTE),
    "graphs of an attribute": lambda count: _inside(b"\x5a\0" * count, *ATTRIBUTE),
    "dimensions of a tensor": lambda count: _inside(b"\x08\x7f" * count, *TENSOR),
    "contents of a tensor": lambda count: _inside(b"\x4a\0" * count, *TENSOR),
    "dimensions of an input": lambda count: _inside(b"\x0a\0" * count, 2, 1, 2, 11, *GRAPH),
    "metadata": lambda count: _inside(b"\x72\0" * count),
    "operator sets": lambda count: _inside(b"\x42\0" * count),
    "graphs": lambda count: _inside(b"\x3a\0" * count),
    "functions": lambda count: _inside(head(25, 0) * (count * 2 // 3)),
    "unknown fields": lambda count: _inside(b"\x7a\0" * count, *NODE),
}
FEW = ("nodes", "attributes", "contents of a tensor", "dimensions of a tensor", "metadata")

LOOK = """
import resource, sys, time
from pathlib import Path
from quark.errors import QuarkError
from quark.onnx.load.reading import read_proto
from quark.inspect.inspection import inspect_model
from quark.inspect.inspection import inspection_table
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]), resource.RLIM_INFINITY))
for path in map(Path, sys.argv[2:]):
    start = time.monotonic()
    try:
        inspection_table(inspect_model(path, read_proto))
        outcome = "fine"
    except QuarkError as error:
        outcome = f"refused: {error}"
    print(path.name, time.monotonic() - start, outcome, sep="|", flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("names", "megabytes"),
    [(FEW, 4), pytest.param(tuple(TINY_FIELDS), 16, marks=pytest.mark.slow)],
    ids=["4 MB", "16 MB"],
)
def test_a_file_of_tiny_fields_costs_little_to_inspect(names: tuple[str, ...], megabytes: int, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / f"{name}.onnx").write_bytes(TINY_FIELDS[name](megabytes * 500_000))
    may_take = MAY_TAKE_BYTES if megabytes == 16 else MAY_TAKE_BYTES * 3 // 5
    command = [sys.executable, "-c", LOOK, str(may_take), *(str(tmp_path / f"{name}.onnx") for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=len(names) * MAY_TAKE_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stderr.strip(), done.stderr[-2000:]
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [f"{name}.onnx" for name in names]
    assert all(float(seconds) < MAY_TAKE_SECONDS for _, seconds, _ in lines), lines


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TINY_FIELDS["nodes"](600_000), ("more than 500,000 nodes", "At most there may be")),
        (TINY_FIELDS["initializers"](600_000), ("more than 500,000 tensors",)),
        (TINY_FIELDS["inputs"](300_000), ("more than 200,000 inputs and outputs",)),
        (TINY_FIELDS["metadata"](200_000), ("more than 100,000 functions, operator sets and metadata entries",)),
        (TINY_FIELDS["attributes"](2_000_000), ("the names and attributes that its size allows", "192 MB")),
        (_inside(b"\x10\x01" + b"\x08\x7f" * 1000, *TENSOR), ("1000 dimensions", "at most 64")),
        (_inside(b"", *(6, 5, 1) * 40, *GRAPH), ("100 levels of messages inside each other",)),
    ],
    ids=["nodes", "tensors", "inputs", "metadata", "attributes", "dimensions", "levels"],
)
def test_the_limit_is_named(content: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "hostile.onnx"
    path.write_bytes(content)
    assert_one_line_error(run("inspect", path), "hostile.onnx", *words)


def test_a_network_of_100000_nodes_is_within_the_limits() -> None:
    """With the attributes, weights and value infos that convolutions have. Here the nodes have one name."""
    count = 100_000
    node = helper.make_node("Conv", ["v", "w"], ["v"], name="conv_100000", pads=[1, 1, 1, 1], strides=[1, 1], group=1)
    info = tensor_info("value_100000", 1, 3, 8, 8)
    graph = [head(1, node.ByteSize()) + node.SerializeToString()] * count
    graph += [head(13, info.ByteSize()) + info.SerializeToString()] * count
    for index in range(count):
        tensor = onnx.TensorProto(name=f"w{index}", data_type=FLOAT, dims=[1, 1, 1, 1], raw_data=b"\0\0\0\0")
        graph.append(head(5, tensor.ByteSize()) + tensor.SerializeToString())
    carved = carve(read_source(_inside(b"".join(graph), *GRAPH)))
    assert len(carved.proto.graph.node) == len(carved.proto.graph.initializer) == count


# --- names and parts that come often -----------------------------------------------------------------------------


def _chain(count: int, name: Callable[[int], str]) -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", [f"v{index}"], [f"v{index + 1}"], name=name(index)) for index in range(count)]
    return model_of(nodes, [tensor_info("v0", 2)], [tensor_info(f"v{count}", 2)])


def _calls(count: int) -> onnx.ModelProto:
    body = [helper.make_node("Relu", ["a"], ["t"], name="n"), helper.make_node("Neg", ["t"], ["b"], name="n")]
    function = helper.make_function("f", "f", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    nodes = [helper.make_node("f", [f"v{index}"], [f"v{index + 1}"], domain="f") for index in range(count)]
    ends = [tensor_info("v0", 2)], [tensor_info(f"v{count}", 2)]
    return model_of(nodes, *ends, functions=[function], domains=["f"])


def _branches(count: int) -> onnx.ModelProto:
    def branch(name: str, reads: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node("Relu", [reads], [name])], "b", [], [tensor_info(name, 2)])

    nodes = [
        helper.make_node(
            *("If", ["c"], [f"v{index + 1}"]),
            then_branch=branch(f"t{index}", f"v{index}"),
            else_branch=branch(f"e{index}", f"v{index}"),
        )
        for index in range(count)
    ]
    inputs = [tensor_info("v0", 2), tensor_info("c", kind=TensorProto.BOOL)]
    return model_of(nodes, inputs, [tensor_info(f"v{count}", 2)])


def _repeated(field: str, count: int) -> onnx.ModelProto:
    """A right model with so many more parts, of which two are equal."""
    model = conv_bn_relu()
    parts = getattr(model.graph, field)
    for index in range(count):
        part = parts.add()
        part.CopyFrom(parts[0])
        part.name = f"more{min(index, count - 2)}"
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_chain(16_000, lambda _: "same"), None),
        (_chain(4000, lambda _: ""), None),
        (_calls(5000), None),
        (_branches(1500), None),
        (_repeated("input", 60_000), ("two inputs of the graph are called 'more59998'",)),
        (_repeated("initializer", 60_000), ("two initializers are called 'more59998'",)),
        (
            model_of([helper.make_node("Sum", ["x"] * 20_000, ["y"])], [tensor_info("x", 2)], [tensor_info("y", 2)]),
            ("too many inputs", "20,000", "100,000,000"),
        ),
    ],
    ids=["equal names", "no names", "calls", "subgraphs", "equal inputs", "equal initializers", "inputs of a node"],
)
def test_thousands_of_a_kind_take_linear_time(model: onnx.ModelProto, words: tuple[str, ...] | None) -> None:
    start = time.monotonic()
    if words is None:
        names = [node.name for node in load(model).model.graph.all_nodes()]
        assert len(set(names)) == len(names)
    else:
        with pytest.raises(ModelError) as caught:
            load(model)
        assert not [word for word in words if word not in str(caught.value)], caught.value
    assert time.monotonic() - start < MAY_TAKE_SECONDS


def test_equal_names_get_the_first_free_numbers() -> None:
    model = _chain(5, lambda index: ["a", "a_1", "a", "a", ""][index])
    assert [node.name for node in load(model).model.graph] == ["a", "a_1", "a_2", "a_3", "v5"]


# --- functions ---------------------------------------------------------------------------------------------------


def _functions(depth: int, calls: int, last: str = "Relu", constant: int = 0) -> onnx.ModelProto:
    """Functions that each call the next one so often; the last one has a node of its own."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    functions = []
    for level in range(depth):
        is_last = level == depth - 1
        op_type = last if is_last else f"f{level + 1}"
        domain = "" if op_type == "Relu" else "f"
        names = ["a", *(f"t{index}" for index in range(1, calls)), "b"]
        nodes = [helper.make_node(op_type, [names[index]], [names[index + 1]], domain=domain) for index in range(calls)]
        if is_last and constant:
            nodes.append(helper.make_node("Constant", [], ["c"], value=weight("c", constant)))
        functions.append(helper.make_function("f", f"f{level}", ["a"], ["b"], nodes, opsets))
    call = helper.make_node("f0", ["x"], ["y"], name="call", domain="f")
    ends = [tensor_info("x", 2)], [tensor_info("y", 2)]
    return model_of([call], *ends, functions=functions, domains=["f"])


ENDLESS = {
    "doubled 30 times": (_functions(30, 2), ("inlining its 30 functions", "200,000 nodes")),
    "calls itself": (_functions(1, 1, "f0"), ("function 'f0' calls itself",)),
    "calls in a circle": (_functions(3, 2, "f1"), ("function 'f1' calls itself",)),
    "a chain of 3000": (_functions(3000, 1), ("64 levels deep",)),
    "constants": (_functions(15, 2, constant=40_000), ("bytes",)),
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("reader", ["quantize", "lint", "evaluate", "pack"])
def test_functions_that_never_end_are_refused(name: str, reader: str, tmp_path: Path) -> None:
    model, words = ENDLESS[name]
    path = tmp_path / "functions.onnx"
    onnx.save(model, path)
    readers: dict[str, Callable[[], object]] = {
        "quantize": lambda: load(path),
        "lint": lambda: lint(path),
        "evaluate": lambda: Network(path),
        "pack": lambda: pack_model(path, tmp_path / "out.onnx"),
    }
    with pytest.raises(ModelError) as caught:
        readers[reader]()
    assert not [word for word in ("functions.onnx", *words) if word not in str(caught.value)], caught.value


NESTED = """
<ir_version: 8, opset_import: ["": 17, "f": 1]>
g (float[2] x, bool c) => (float[2] y, float[2] z) {
  a = f.scaled <alpha = 2.0> (x)
  b, same = f.both (a)
  z = If (c) <then_branch = t () => (float[2] p) { p = f.scaled (b) },
              else_branch = e () => (float[2] q) { q = Neg (b) }>
  y = Add (b, same)
}
<domain: "f", opset_import: ["": 17, "f": 1]>
scaled <alpha: float = 0.5> (x) => (y) { t = LeakyRelu <alpha: float = @alpha> (x)  y = Add (t, x) }
<domain: "f", opset_import: ["": 17, "f": 1]>
both (x, missing) => (y, x) {
  k = Constant <value = bool {1}> ()
  t = f.scaled <alpha = 3.0> (x)
  y = If (k) <then_branch = t () => (float[2] p) { p = Sub (t, x) }, else_branch = e () => (float[2] q) { q = Neg (t) }>
}
"""


def test_inlined_functions_compute_the_same() -> None:
    model = onnx.parser.parse_model(NESTED)
    loaded = load(model)
    assert "2 functions of the model were inlined" in loaded.remarks
    assert [value.name for value in loaded.model.graph.inputs] == ["x", "c"]
    assert not loaded.model.functions
    import onnx_ir

    inlined = onnx_ir.to_proto(loaded.model).SerializeToString()
    for condition in (True, False):
        feeds = {"x": np.array([-1.5, 2.0], np.float32), "c": np.array(condition)}
        expected, found = (
            onnxruntime.InferenceSession(content).run(None, feeds) for content in (_runnable(model), inlined)
        )
        for one, two in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, two)


def _runnable(model: onnx.ModelProto) -> bytes:
    """ONNX Runtime wants no function that gives out its own input: `same` is what the caller gave."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.functions[1].node.add(op_type="Identity", input=["x"], output=["kept"])
    copy.functions[1].output[1] = "kept"
    return bytes(copy.SerializeToString())


# --- files that are none -----------------------------------------------------------------------------------------


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    folder = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(folder)


def _with_fifo_beside(path: Path) -> None:
    onnx.save(conv_bn_relu(), path, save_as_external_data=True, location="beside.bin", size_threshold=0)
    (path.parent / "beside.bin").unlink()
    os.mkfifo(path.parent / "beside.bin")


VERBS = (
    "inspect MODEL",
    "lint MODEL",
    "quantize MODEL out.onnx --random",
    "compare MODEL good.onnx --data data.npz",
    "compare good.onnx MODEL --data data.npz",
    "evaluate MODEL --data data.npz",
    "debug MODEL good.onnx --random",
    "debug good.onnx MODEL --random",
    "report MODEL --float good.onnx --random",
    "report good.onnx --float MODEL --random",
    "pack MODEL out.onnx",
    "unpack MODEL out.onnx",
    "reproduce MODEL",
    "formats --weights MODEL",
    "search MODEL --calib data.npz",
)


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such files")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "make",
    [_fifo, _device, _socket, Path.mkdir, _with_fifo_beside],
    ids=["FIFO", "device", "socket", "folder", "beside"],
)
def test_what_is_no_regular_file_is_not_opened(
    verb: str, make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(conv_bn_relu(), "good.onnx")
    np.savez("data.npz", x=np.zeros((4, 3, 8, 8), np.float32), labels=np.zeros(4, np.int64))
    make(tmp_path / "odd.onnx")
    result = run(*verb.replace("MODEL", "odd.onnx").split())
    if make is _with_fifo_beside and verb.startswith("inspect"):
        assert result.exit_code == 0, result.output  # what lies beside the model is not looked at
        return
    assert_one_line_error(result, "odd.onnx")
    assert not (tmp_path / "out.onnx").exists()


# --- valid ONNX that is out of the ordinary ----------------------------------------------------------------------


def _sequence(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_sequence_value_info(name, FLOAT, None)


def _product(*more: onnx.NodeProto, inputs=(), outputs=(), initializers=(), domains=()) -> onnx.ModelProto:
    """y = x w, and more."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product"), *more]
    ends = [tensor_info("x", "N", 8), *inputs], [tensor_info("y", "N", 8), *outputs]
    return model_of(nodes, *ends, [weight("w", 8, 8), *initializers], domains=domains)


def _map() -> onnx.ModelProto:
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(7, helper.make_tensor_type_proto(FLOAT, [])))
    node = helper.make_node("ZipMap", ["y"], ["z"], domain="ai.onnx.ml", classlabels_int64s=list(range(8)))
    return _product(node, outputs=[helper.make_value_info("z", kind)], domains=["ai.onnx.ml"])


def _texts(text: bytes) -> onnx.ModelProto:
    tensor = onnx.TensorProto(name="texts", data_type=TensorProto.STRING, dims=[1], string_data=[text])
    node = helper.make_node("Identity", ["texts"], ["t"])
    return _product(node, outputs=[tensor_info("t", 1, kind=TensorProto.STRING)], initializers=[tensor])


def _layers(kind: int = FLOAT, dtype: type = np.float32, opset: int = 17, features: int = 6) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"], name="conv"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "v"], ["y"], name="gemm"),
    ]
    ends = [tensor_info("x", "N", 3, 8, 8, kind=kind)], [tensor_info("y", "N", 4, kind=kind)]
    sizes = {"w": (features, 3, 3, 3), "b": (features,), "v": (features, 4)}
    initializers = [weight(name, *shape, dtype=dtype) for name, shape in sizes.items()]
    return model_of(nodes, *ends, initializers, opset=opset)


def _bfloat16() -> onnx.ModelProto:
    model = _layers(TensorProto.BFLOAT16, opset=22)
    for tensor in model.graph.initializer:
        bits = numpy_helper.to_array(tensor).view(np.uint32) >> 16
        tensor.CopyFrom(
            helper.make_tensor(tensor.name, TensorProto.BFLOAT16, tensor.dims, bits.astype("<u2").tobytes(), raw=True)
        )
    return model


def _beyond_float32() -> onnx.ModelProto:
    model = _layers(DOUBLE, np.float64)
    array = numpy_helper.to_array(model.graph.initializer[0]).copy()
    array.flat[0] = 1e200
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, "w"))
    return model


REFUSED = {
    "sequence output": (
        _product(helper.make_node("SequenceConstruct", ["x", "y"], ["s"]), outputs=[_sequence("s")]),
        ("output 's'", "sequence of tensors", "Remove it from the outputs"),
    ),
    "split at the output": (
        _product(helper.make_node("SplitToSequence", ["y"], ["s"]), outputs=[_sequence("s")]),
        ("output 's'", "sequence of tensors"),
    ),
    "sequence input": (
        _product(helper.make_node("SequenceLength", ["s"], ["n"]), inputs=[_sequence("s")]),
        ("input 's'", "sequence of tensors"),
    ),
    "map output": (_map(), ("output 'z'", "sequence of maps", "zipmap")),
    "text that is not UTF-8": (_texts(b"\xff\xfe"), ("tensor 'texts'", "not UTF-8")),
    "attribute that is not UTF-8": (
        _product(
            helper.make_node("Constant", [], ["t"], name="constant", value_strings=[b"\xff"]),
            outputs=[tensor_info("t", 1, kind=TensorProto.STRING)],
        ),
        ("attribute 'value_strings' of Constant 'constant'", "not UTF-8"),
    ),
    "convolution without features": (_layers(features=0), ("Conv 'conv' has no features", "'w'", "[0, 3, 3, 3]")),
    "float64 beyond float32": (_beyond_float32(), ("tensor 'w' of float64", "beyond the range of float32")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_quantized_is_refused_before_the_work(name: str, tmp_path: Path) -> None:
    model, words = REFUSED[name]
    onnx.save(model, tmp_path / "odd.onnx")
    result = run("quantize", tmp_path / "odd.onnx", tmp_path / "out.onnx", "--config", "A8W8", "--random")
    assert_one_line_error(result, "odd.onnx", *words)
    assert [each.name for each in tmp_path.iterdir()] == ["odd.onnx"]
    for verb in ("inspect", "lint"):
        result = run(verb, tmp_path / "odd.onnx")
        assert "should not happen" not in result.output, (verb, result.output)


TAKEN: dict[str, Callable[[], onnx.ModelProto]] = {
    "sequence inside": lambda: _product(
        helper.make_node("SplitToSequence", ["y"], ["s"], axis=1),
        helper.make_node("Identity", ["s"], ["i"]),
        helper.make_node("ConcatFromSequence", ["i"], ["c"], axis=1),
        helper.make_node("MatMul", ["c", "w"], ["z"]),
        outputs=[tensor_info("z", "N", 8)],
    ),
    "optional output": lambda: _product(
        helper.make_node("Optional", ["y"], ["o"]),
        outputs=[
            helper.make_value_info("o", helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, ["N", 8])))
        ],
    ),
    "texts": lambda: _texts("é".encode()),
    "product without features": lambda: _product(
        helper.make_node("Gemm", ["y", "empty"], ["h"]),
        helper.make_node("MatMul", ["h", "wide"], ["z"]),
        outputs=[tensor_info("z", "N", 4)],
        initializers=[weight("empty", 8, 0), weight("wide", 0, 4)],
    ),
    "float64": lambda: _layers(DOUBLE, np.float64),
    "float64 of opset 11": lambda: _layers(DOUBLE, np.float64, opset=11),
    "bfloat16": _bfloat16,
}
REMARKS = {
    "float64": "float64 converted to float32; float64 inputs and outputs stay, with a Cast",
    "float64 of opset 11": "float64 converted to float32; float64 inputs and outputs stay, with a Cast",
    "bfloat16": "bfloat16 converted to float32, inputs and outputs as well",
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("config", ["A8W8", "MXINT8"])
def test_what_is_odd_and_valid_is_quantized(name: str, config: str) -> None:
    model = TAKEN[name]()
    result = quantize(model, config=config, use_random_data=True)
    assert any("converted" in remark for remark in result.report.remarks) == (name in REMARKS)
    assert name not in REMARKS or REMARKS[name] in result.report.remarks
    assert result.report.outputs, "nothing was compared"
    for one, two in _ports(model, result.model):
        kept = one.type.tensor_type.elem_type
        assert one.name == two.name
        assert two.type.tensor_type.elem_type == (FLOAT if kept == TensorProto.BFLOAT16 else kept)


def _ports(one: onnx.ModelProto, two: onnx.ModelProto) -> Iterator[tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]]:
    yield from zip(one.graph.input, two.graph.input, strict=True)
    yield from zip(one.graph.output, two.graph.output, strict=True)


def test_a_float64_network_computes_what_it_did() -> None:
    model = _layers(DOUBLE, np.float64)
    images = np.random.default_rng(1).normal(size=(4, 3, 8, 8))
    loaded = load(model)
    import onnx_ir

    session = onnxruntime.InferenceSession(onnx_ir.to_proto(loaded.model).SerializeToString())
    (found,) = session.run(None, {"x": images})
    assert found.dtype == np.float64
    reference = onnx.reference.ReferenceEvaluator(model)
    expected: Any = reference.run(None, {"x": images})
    np.testing.assert_allclose(found, expected[0], rtol=1e-4, atol=1e-5)


def test_float64_beside_the_layers_stays() -> None:
    model = _product(
        helper.make_node("Cast", ["y"], ["d"], to=DOUBLE),
        helper.make_node("Add", ["d", "one"], ["z"]),
        outputs=[tensor_info("z", "N", 8, kind=DOUBLE)],
        initializers=[numpy_helper.from_array(np.array(1.0), "one")],
    )
    loaded = load(model)
    assert not loaded.remarks
    assert [node.op_type for node in loaded.model.graph] == ["MatMul", "Cast", "Add"]


def test_a_float64_model_that_is_run_as_it_is_gets_advice() -> None:
    with pytest.raises(QuarkError, match=r"Conv.*float64.*export it in float32"):
        open_session(_layers(DOUBLE, np.float64))


def test_a_float64_model_is_evaluated_as_it_is_quantized(tmp_path: Path) -> None:
    model = _layers(DOUBLE, np.float64)
    onnx.save(model, tmp_path / "double.onnx")
    images = np.random.default_rng(1).normal(size=(4, 3, 8, 8))
    (found,) = Network(tmp_path / "double.onnx").run({"x": images})
    expected: Any = onnx.reference.ReferenceEvaluator(model).run(None, {"x": images})
    np.testing.assert_allclose(found, expected[0], rtol=1e-4, atol=1e-5)
