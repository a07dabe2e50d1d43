"""Runs whose input files another program changes meanwhile, each in a process that this may kill.

    python changed_inputs.py FOLDER < CASES

The cases are a JSON list of the fields of `Case`; the results, one JSON object of the fields of `Result`. Processes are
forked from this one, which has imported everything and started no thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime  # noqa: F401 - before anything is forked
from onnx import TensorProto, helper, numpy_helper

from quark.evaluate import Network
from quark.inspect.diagnose import diagnosing
from quark.onnx import get_default_config, large_tensors, quantize, session
from quark.onnx.calibrate import FloatRunner
from quark.onnx.input_files import MappedFile
from quark.onnx.load import load
from quark.onnx.pack import pack, pack_model, unpack, unpack_model
from quark.onnx.quantization import pipeline, quantizer, reproduction
from quark.onnx.save import HashedFile

WIDTH, LAYERS = 192, 4
OLD = b"what was here before"
STEPS = (
    *("optimize", "call", "protected_run", "place", "measure", "decide"),
    *("insert", "finish", "compare_held_out"),
)


def network() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    names = ["x", *(f"y{i}" for i in range(LAYERS))]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], f"n{i}") for i in range(LAYERS)]
    weights = [random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for _ in range(LAYERS)]
    tensors = [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, WIDTH]) for name in ("x", names[-1])]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def samples() -> list[np.ndarray]:
    return list(np.random.default_rng(1).standard_normal((8, 1, WIDTH)).astype(np.float32))


# --- what other programs do to a file


def nothing(path: Path) -> None:
    pass


def shrink(path: Path) -> None:
    os.truncate(path, 5000)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    """Write other bytes over all but the first ones; the size stays."""
    with path.open("r+b") as file:
        file.seek(2000)
        content = np.frombuffer(file.read(), np.uint8) ^ 1
        file.seek(2000)
        file.write(content.tobytes())


def rewrite_secretly(path: Path) -> None:
    """Write other bytes and set the modification time back."""
    status = path.stat()
    rewrite(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def rename_over(path: Path) -> None:
    other = path.with_name("other")
    shutil.copyfile(path, other)
    rewrite(other)
    os.replace(other, path)


def delete(path: Path) -> None:
    path.unlink()


CHANGES = (shrink, empty, grow, rewrite, rewrite_secretly, rename_over, delete)


@dataclass(frozen=True)
class Case:
    """Work in which a file is changed at some moment; `changed` is a pattern for its name. The weights of a large model
    are mapped, those of a small one are held in memory."""

    work: str
    moment: str
    change: str
    changed: str = "net.data"
    is_large: bool = True

    def __str__(self) -> str:
        size = "large" if self.is_large else "small"
        return f"{self.work}: {self.moment}: {self.change} {self.changed}: {size}"


@dataclass(frozen=True)
class Result:
    """What became of a process; `files` has the hashes of what it wrote."""

    signal: int
    error: str
    text: str
    files: dict[str, str]


def before(place: Any, name: str, action: Callable[[], None], call: int = 1) -> Any:
    """Do something right before one of the calls of a function."""
    original, calls = getattr(place, name), iter(range(1, 10_000))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            action()
        return original(*args, **kwargs)

    return mock.patch.object(place, name, wrapped)


def quantizing(moment: str, model: Path, out: Path, change: Callable[[], None]) -> None:
    preset = "MXFP4E2M1" if moment == "pack_message" else "A8W8"
    if moment in STEPS:
        with before(pipeline, moment, change):
            quantize(model, samples(), preset).save(out)
        return
    if moment == "between samples":
        with before(FloatRunner, "_run", change, call=2):
            quantize(model, samples(), preset).save(out)
        return
    result = quantize(model, samples(), preset)
    if moment == "save":
        change()
        result.save(out)
    elif moment in ("write_tensor", "digest"):  # all weights are written before the digest
        with before(HashedFile, moment, change, call=3 if moment == "write_tensor" else 1):
            result.save(out)
    elif moment == "pack_message":
        with before(quantizer, "pack_message", change):
            result.save(out, pack="portable")
    elif moment == "model":
        change()
        out.write_bytes(result.model.SerializeToString(deterministic=True))
    elif moment == "model is in memory":
        assert result.model.graph.node
        change()
        result.save(out)
    else:
        raise ValueError(moment)


def work(case: Case, folder: Path, change: Callable[[], None]) -> None:
    model, quantized, packed, out = (folder / f"{name}.onnx" for name in ("net", "q", "packed", "out"))
    out.write_bytes(OLD)
    if case.work == "quantize":
        quantizing(case.moment, folder / "inline.onnx" if case.changed == "inline.onnx" else model, out, change)
    elif case.work == "pack":
        with before(pack, case.moment, change):
            pack_model(quantized, out)
    elif case.work == "unpack":
        with before(unpack, case.moment, change):
            unpack_model(packed, out)
    elif case.work == "reproduce":
        with before(reproduction, case.moment, change):
            reproduction.reproduce(quantized, model, output=out)
    elif case.work == "diagnose":
        with before(diagnosing, case.moment, change):
            diagnosing.diagnose(model, quantized, samples())
    elif case.work == "evaluate":
        net = Network(model)
        net.run({"x": samples()[0]})
        change()
        net.run({"x": samples()[0]})
    elif case.work == "hash":
        with (
            mock.patch.object(large_tensors, "READ_BYTES", 50_000),
            before(MappedFile, "read_bytes", change, call=3),  # in the middle of the weights
        ):
            out.write_text(load(model).sha256)
    else:
        raise ValueError(case.work)


def prepare(folder: Path) -> None:
    """The files that all cases start with."""
    onnx.save(network(), folder / "inline.onnx")
    onnx.save(network(), folder / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    config = replace(
        get_default_config("MXFP4E2M1"), use_external_data_format=True, extra_options={"UseRandomData": True}
    )
    quantize(folder / "net.onnx", config=config).save(folder / "q.onnx")
    pack_model(folder / "q.onnx", folder / "packed.onnx")


def forked(action: Callable[[], None], folder: Path) -> Result:
    """Do something in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        error, text = "", ""
        try:
            action()
        except Exception as raised:
            error, text = type(raised).__name__, str(raised)
        os.write(writer, json.dumps([error, text[:4000]]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        error, text = json.loads(stream.read() or b'["", ""]')
    _, status = os.waitpid(child, 0)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("out*"))}
    return Result(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, error, text, files)


def run(case: Case, originals: Path, folder: Path) -> Result:
    shutil.copytree(originals, folder)
    (changed,) = folder.glob(case.changed)

    def action() -> None:
        if case.is_large:
            large_tensors.LARGE_MODEL_BYTES = 0
            large_tensors.LARGE_TENSOR_BYTES = 1024
            session._FILE_FROM_BYTES = 1000
        work(case, folder, lambda: globals()[case.change](changed))

    result = forked(action, folder)
    shutil.rmtree(folder)
    return result


def main(folder: Path) -> None:
    originals = folder / "originals"
    originals.mkdir()
    prepared = forked(lambda: prepare(originals), originals)
    assert not prepared.error, prepared
    assert not prepared.signal, prepared
    cases = [Case(**fields) for fields in json.load(sys.stdin)]
    results = {str(case): asdict(run(case, originals, folder / "work")) for case in cases}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
