"""Model files that cannot be quantized, each made in a folder; `BROKEN_MODELS` has them, with what is to be said.

Every maker writes `broken.onnx` into the folder, and what it needs beside it, and returns its path.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx_models import Net, conv_bn_relu
from packed_models import marked_model

FILE = "broken.onnx"
SIZE = 64


@dataclass(frozen=True)
class BrokenModel:
    """`words` are to be in the message."""

    name: str
    make: Callable[[Path], Path]
    words: tuple[str, ...]


def _bytes(content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / FILE).write_bytes(content)
        return folder / FILE

    return make


def _net(change: Callable[[onnx.ModelProto], object]) -> Callable[[Path], Path]:
    """A small right model after one change."""

    def make(folder: Path) -> Path:
        model = conv_bn_relu()
        change(model)
        (folder / FILE).write_bytes(model.SerializeToString())
        return folder / FILE

    return make


def _external(**entries: str) -> Callable[[Path], Path]:
    """A model with its weight beside it, after a change of what it says about that."""

    def make(folder: Path) -> Path:
        net = Net()
        net.input("x", (2, SIZE))
        model = net.model(net.node("MatMul", "x", net.weight(SIZE, SIZE, name="w"), output="y"))
        onnx.save(model, folder / FILE, save_as_external_data=True, location="weights.bin", size_threshold=0)
        model = onnx.load(folder / FILE, load_external_data=False)
        tensor = model.graph.initializer[0]
        known = {entry.key: entry.value for entry in tensor.external_data} | entries
        del tensor.external_data[:]
        for key, value in known.items():
            tensor.external_data.add(key=key, value=value)
        (folder / FILE).write_bytes(model.SerializeToString())
        return folder / FILE

    return make


def _folder(folder: Path) -> Path:
    (folder / FILE).mkdir()
    (folder / FILE / "inside.onnx").touch()
    return folder / FILE


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / FILE)
    return folder / FILE


def _missing(folder: Path) -> Path:
    return folder / FILE


def _tensor_proto(folder: Path) -> Path:
    (folder / FILE).write_bytes(numpy_helper.from_array(np.ones((4, 4), np.float32), "w").SerializeToString())
    return folder / FILE


def _link_out(folder: Path) -> Path:
    path = _external()(folder)
    outside = folder.parent / f"{folder.name}-elsewhere.bin"
    (folder / "weights.bin").replace(outside)
    (folder / "weights.bin").symlink_to(outside)
    return path


def _short_file(folder: Path) -> Path:
    path = _external()(folder)
    os.truncate(folder / "weights.bin", 100)
    return path


def _no_file(folder: Path) -> Path:
    path = _external()(folder)
    (folder / "weights.bin").unlink()
    return path


def _circle(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Add", ["x", "b"], ["a"], name="first"))
    model.graph.node.append(helper.make_node("Relu", ["a"], ["b"], name="second"))


def _no_initializer(model: onnx.ModelProto) -> None:
    del model.graph.initializer[0]


def _node(op_type: str, reads: str = "x", domain: str = "") -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node.append(helper.make_node(op_type, [reads], ["z"], name="the_node", domain=domain))

    return change


def _tensor(**changes: object) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer.add(name="lies", data_type=TensorProto.FLOAT, raw_data=bytes(16))
        tensor.dims.extend(changes.get("dims", [4]))
        tensor.data_type = changes.get("data_type", TensorProto.FLOAT)

    return change


def _twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


def _output_twice(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Relu", ["x"], ["y"], name="again"))


def _input_twice(model: onnx.ModelProto) -> None:
    model.graph.input.append(model.graph.input[0])


def _result_twice(model: onnx.ModelProto) -> None:
    model.graph.output.append(model.graph.output[0])


def _opset(version: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    return change


def _weights(value: float) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        array = numpy_helper.to_array(model.graph.initializer[0]).copy()
        array.flat[0] = value
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, model.graph.initializer[0].name))

    return change


def _quantized(folder: Path) -> Path:
    model = conv_bn_relu()
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "s"))
    model.graph.node.append(helper.make_node("QuantizeLinear", ["y", "s"], ["q"], name="the_node"))
    (folder / FILE).write_bytes(model.SerializeToString())
    return folder / FILE


def _marked(folder: Path) -> Path:
    onnx.save(marked_model("mxint8", shapes=(((8, 32), 1),)), folder / FILE)
    return folder / FILE


def _untyped(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UNDEFINED


def _strings(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING


def _attribute(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("no_such_attribute", 3))


def _channels(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 7


_GOOD = conv_bn_relu().SerializeToString()
_HEADER = b"\x08\x08\x3a\xff\xff\xff\xff\x7f"  # a graph of 34 GB, it says

BROKEN_MODELS = (
    BrokenModel("missing", _missing, ("no such file", "xpected an ONNX model")),
    BrokenModel("empty", _bytes(b""), ("empty", "0 bytes")),
    BrokenModel("text", _bytes(b"hello\n" * 99), ("not an ONNX model",)),
    BrokenModel("pickle", _bytes(pickle.dumps({"a": 1})), ("not an ONNX model", "torch.onnx.export")),
    BrokenModel("web page", _bytes(b"<!DOCTYPE html><html>404 Not Found</html>"), ("not an ONNX model", "web page")),
    BrokenModel(
        "pointer of a large file store",
        _bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"),
        ("not an ONNX model", "git lfs pull"),
    ),
    BrokenModel("truncated", _bytes(_GOOD[:-200]), ("damaged", "again")),
    BrokenModel("truncated early", _bytes(_GOOD[:40]), ("damaged",)),
    BrokenModel("length that lies", _bytes(_HEADER + bytes(30)), ("damaged",)),
    BrokenModel("folder", _folder, ("is a folder", "inside")),
    BrokenModel("pipe", _pipe, ("device or pipe",)),
    BrokenModel("a tensor instead of a model", _tensor_proto, ("broken.onnx",)),
    BrokenModel("no nodes", _net(lambda model: model.graph.ClearField("node")), ("no nodes",)),
    BrokenModel("circle", _net(_circle), ("cycle", "first")),
    BrokenModel("missing initializer", _net(_no_initializer), ("reads", "nothing makes")),
    BrokenModel("value that nothing makes", _net(_node("Relu", "ghost")), ("the_node", "ghost", "nothing makes")),
    BrokenModel("value made twice", _net(_output_twice), ("again", "'y'", "made once")),
    BrokenModel("initializer twice", _net(_twice), ("two initializers", "unique")),
    BrokenModel("input twice", _net(_input_twice), ("two inputs", "'x'")),
    BrokenModel("output twice", _net(_result_twice), ("two outputs", "'y'")),
    BrokenModel("unknown operator", _net(_node("Relux")), ("the_node", "Did you mean Relu")),
    BrokenModel("unknown domain", _net(_node("Magic", domain="com.example")), ("the_node", "com.example")),
    BrokenModel("unknown attribute", _net(_attribute), ("no_such_attribute",)),
    BrokenModel("opset 1", _net(_opset(1)), ("opset 1",)),
    BrokenModel("opset 99", _net(_opset(99)), ("opset 99",)),
    BrokenModel("opset below 0", _net(_opset(-3)), ("opset -3",)),
    BrokenModel("opset beyond all numbers", _net(_opset(2**62)), ("opset 4611686018427387904",)),
    BrokenModel("no opset", _net(lambda model: model.ClearField("opset_import")), ("opset",)),
    BrokenModel("dims that lie", _net(_tensor(dims=[5])), ("lies", "16 bytes", "needs 20")),
    BrokenModel("negative dims", _net(_tensor(dims=[-4])), ("lies", "-4")),
    BrokenModel("huge dims", _net(_tensor(dims=[2**40, 2**40])), ("lies", "at most")),
    BrokenModel("unknown type", _net(_tensor(data_type=77)), ("lies", "77")),
    BrokenModel("NaN in a weight", _net(_weights(np.nan)), ("c0", "NaN")),
    BrokenModel("Inf in a weight", _net(_weights(np.inf)), ("c0", "Inf")),
    BrokenModel("input of no type", _net(_untyped), ("'x'", "no type of tensor")),
    BrokenModel("input of text", _net(_strings), ("'x'",)),
    BrokenModel("shapes that do not fit", _net(_channels), ("the float model", "C: 7 kernel channels: 3")),
    BrokenModel("quantized already", _quantized, ("already quantized", "the_node", "float model")),
    BrokenModel("quantized to blocks already", _marked, ("already quantized", "float model")),
    BrokenModel("external: ..", _external(location="../weights.bin"), ("'w'", "without '..'")),
    BrokenModel("external: absolute", _external(location="/etc/passwd"), ("'w'", "inside the model's folder")),
    BrokenModel("external: a drive", _external(location="C:\\weights.bin"), ("'w'", "inside the model's folder")),
    BrokenModel("external: no location", _external(location=""), ("'w'", "inside the model's folder")),
    BrokenModel("external: link that leads out", _link_out, ("'w'", "link that leads out")),
    BrokenModel("external: file too short", _short_file, ("'w'", "of a file of 100 bytes")),
    BrokenModel("external: no file", _no_file, ("'w'", "is not there")),
    BrokenModel("external: a long name", _external(location="a" * 3000), ("'w'", "is not a path")),
    BrokenModel("external: a folder", _external(location="."), ("'w'",)),
    BrokenModel("external: offset beyond the end", _external(offset="99999999"), ("'w'", "99999999")),
    BrokenModel("external: negative offset", _external(offset="-8"), ("'w'", "-8", "expected a number")),
    BrokenModel("external: offset of 30 digits", _external(offset="9" * 30), ("'w'", "expected a number")),
    BrokenModel("external: wrong length", _external(length="12"), ("'w'", "12", "16384")),
)
