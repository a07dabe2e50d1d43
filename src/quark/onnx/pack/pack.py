"""Pack: store the weights of a quantized file in the bits that their formats have.

A weight keeps its name: where an initializer was, nodes make a value of that name from smaller tensors. So its readers,
in subgraphs too, read the same numbers as before.

Float weights behind a quantizer, as other tools write them, first become what the quantizer makes of them:

    MX-, BFPQuantizeDequantize     the constant is rounded, and the node becomes our mark: the file then holds what
                                   every run computed
    QuantizeLinear, Extended*      ONNX Runtime itself computes the codes, which replace the node and the weight

A constant that something else reads in float stays, with its quantizer: two copies would not make the file smaller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper

from quark.errors import ModelError, QuarkError, unknown_name
from quark.onnx.file_graph import bare_graph, read_message
from quark.onnx.input_files import check_unchanged
from quark.onnx.large_tensors import ComputedTensor, Message
from quark.onnx.pack.block_codes import encode, obstacle
from quark.onnx.pack.editing import Editing, Record, WeightRecord, is_packed, write_record
from quark.onnx.pack.packed_forms import CustomForm, Form, NativeForm, PortableForm, Stored
from quark.onnx.plan_reader import BLOCK, QuantizedGraph, Quantizer, is_quantize
from quark.onnx.save import SaveOptions, check_output, together, write_model
from quark.onnx.session import open_session
from quark.ops.onnx_nodes import CONSTANT_DOMAIN, define_constant_marks
from quark.ops.schema import DOMAIN, VERSION
from quark.plan import BlockChoice
from quark.rounded import block_values

MIN_OPSET = 13
MIN_SAVED_BYTES = 1024  # about what the nodes and the names of a packed weight take
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
CODES = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)
INTEGERS = (*CODES, ir.DataType.INT4, ir.DataType.UINT4)
UNMARKED = "it is in no block format"


class Profile(str, Enum):
    """The intended readers of a packed file."""

    PORTABLE = "portable"  # any ONNX Runtime: standard operators
    CUSTOM = "custom"  # the same as calls of a function in the file: fewer nodes to look at
    NATIVE = "native"  # runtimes that take ONNX's own small types


@dataclass(frozen=True)
class PackedWeight:
    """One weight. `bits` is its size in the file per element, scales included."""

    name: str
    format: str
    shape: tuple[int, ...]
    bits: float
    bytes_before: int
    bytes_after: int
    note: str = ""


@dataclass(frozen=True)
class LeftWeight:
    """A weight that stays as it was."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class PackFacts:
    """All weights of the main graph that are in a format or behind a quantizer. Sizes are those of the files, external
    data included, or of the weights alone if nothing was written."""

    profile: str
    packed: tuple[PackedWeight, ...]
    left: tuple[LeftWeight, ...]
    bytes_before: int
    bytes_after: int
    remarks: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """The average over all packed weights; 0 if there are none."""
        count = sum(weight.bytes_after * 8 / weight.bits for weight in self.packed)
        return sum(weight.bytes_after for weight in self.packed) * 8 / count if count else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bits_per_weight": self.bits_per_weight}


@dataclass(frozen=True)
class UnpackFacts:
    """The weights that are float numbers again."""

    weights: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


FORMS: dict[Profile, Callable[[Editing], Form]] = {
    Profile.PORTABLE: PortableForm,
    Profile.CUSTOM: CustomForm,
    Profile.NATIVE: NativeForm,
}


def pack_model(
    source: str | os.PathLike[str], target: str | os.PathLike[str], profile: str | Profile = Profile.PORTABLE
) -> PackFacts:
    """Pack a quantized file into another one, which is written whole or not at all; the input is never overwritten.

    Raises ModelError if the file is packed already, or has nothing to pack.
    """
    chosen = profile_of(profile)
    path = check_output(target, source, has_report=False)
    message, size, files = read_message(source)
    try:
        packed, facts = pack_message(message, chosen)
    except ModelError as error:
        raise ModelError(f"'{os.fspath(source)}': {error}") from error
    if not facts.packed:
        raise ModelError(f"'{os.fspath(source)}': {facts.remarks[0]}")
    with together(path):
        written = write_model(packed, path, SaveOptions())
        check_unchanged(files)
    return replace(facts, bytes_before=size, bytes_after=written.bytes)


def pack_message(message: Message, profile: str | Profile = Profile.PORTABLE) -> tuple[Message, PackFacts]:
    """`pack_model` in memory: returns a new message with smaller weights, and what was done. If there is nothing to
    pack, it returns the message itself, with a remark that says why."""
    chosen = profile_of(profile)
    if is_packed(message.proto):
        raise ModelError("the model is packed already; 'quark unpack' gives the model that it was packed from")
    editing = Editing(message)
    if editing.opset < MIN_OPSET:
        raise ModelError(f"the model has opset {editing.opset}, and packing needs {MIN_OPSET} or later: convert it")
    before = sum(editing.tensor(name).nbytes for name in editing.order)
    ir_version = editing.proto.ir_version
    graph = bare_graph(message.proto)
    for name, tensor in message.weights.items():
        graph.graph.initializers[name].const_value = tensor
    packing = _Packing(editing, FORMS[chosen](editing), graph)
    packing.run()
    if not packing.packed:
        return message, PackFacts(chosen.value, (), tuple(packing.left), before, before, (packing.nothing_to_pack(),))
    values = packing.form.finish()
    write_record(editing.proto, Record(chosen.value, ir_version, values, tuple(packing.records)))
    result = editing.message()
    after = sum(editing.tensor(name).nbytes for name in editing.order)
    remarks = (*packing.remarks, *packing.form.remarks)
    return result, PackFacts(chosen.value, tuple(packing.packed), tuple(packing.left), before, after, remarks)


def profile_of(profile: str | Profile) -> Profile:
    """The profile of that name."""
    try:
        return Profile(profile)
    except ValueError as error:
        raise unknown_name("profile", profile, [member.value for member in Profile]) from error


class _Packing:
    """One run over the weights of a model. `model` is the graph before anything is changed."""

    def __init__(self, editing: Editing, form: Form, model: ir.Model) -> None:
        self.editing, self.form = editing, form
        self.packed: list[PackedWeight] = []
        self.left: list[LeftWeight] = []
        self.records: list[WeightRecord] = []
        self.remarks: list[str] = []
        self._protos = dict(zip(model.graph, editing.graph.node, strict=True))
        self._quantizers = list(QuantizedGraph(model).quantizers.values())
        marks = [quantizer for quantizer in self._quantizers if quantizer.node.domain == CONSTANT_DOMAIN]
        constants = [mark for mark in marks if mark.source.is_initializer()]
        self._marks: dict[str, Quantizer] = {}  # the first mark on each constant of the main graph
        for mark in constants:
            if mark.source.graph is model.graph:
                self._marks.setdefault(str(mark.source.name), mark)
        self._inside = sum(mark.source.graph is not model.graph for mark in constants)

    def run(self) -> None:
        editing, notes = self.editing, self._round_block_weights()
        self._store_integer_codes()
        positions = {name: index for index, name in enumerate(editing.order)}
        for name in [name for name in editing.order if name in self._marks]:
            self._pack(name, self._marks[name], notes.get(name, ""), positions[name])
        # the rest: large constants that were neither packed nor left
        known = {weight.name for weight in self.packed} | {weight.name for weight in self.left}
        known |= {name for record in self.records for name in record.planes.values()}
        integers = 0
        for name in editing.order:
            tensor = editing.tensor(name)
            if name in known or tensor.nbytes < MIN_SAVED_BYTES:
                continue
            if tensor.dtype in INTEGERS:
                integers += 1
            elif tensor.dtype in FLOATS:
                self.left.append(LeftWeight(name, tensor.nbytes, UNMARKED))
        if integers:
            noun = "tensor is" if integers == 1 else "tensors are"
            self.remarks.append(f"{integers} {noun} integer codes already, at their true width")
        if self._inside:
            self.remarks.append(f"{self._inside} marked weights are constants of subgraphs, which are left as they are")

    def nothing_to_pack(self) -> str:
        """The reason why nothing was packed, and what to do."""
        if self.remarks:
            return f"there is nothing to pack: {self.remarks[0]}"
        others = [weight for weight in self.left if weight.reason != UNMARKED]
        if not others:
            return (
                "there is nothing to pack: no weight is in a block format. Quantize the model first, say to MXFP4E2M1"
            )
        largest = max(others, key=lambda weight: weight.bytes)
        return f"there is nothing to pack. The largest weight is '{largest.name}': {largest.reason}"

    def _round_block_weights(self) -> dict[str, str]:
        """Round the constants that block quantizers read. Return the names of the new ones, each with a note."""
        editing = self.editing
        notes: dict[str, str] = {}
        for name, quantizers in self._behind(
            [
                quantizer
                for quantizer in self._quantizers
                if quantizer.node.op_type in BLOCK and quantizer.node.domain == DOMAIN
            ]
        ):
            tensor = editing.tensor(name)
            reason = self._obstacle(name, quantizers)
            if not reason and tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
                reason = f"it is of type {tensor.dtype.name.lower()}"
            try:
                choices = [quantizer.choice for quantizer in quantizers] if not reason else []
            except QuarkError as error:
                reason = str(error)
            if reason:
                self.left.append(LeftWeight(name, tensor.nbytes, reason))
                continue
            for quantizer, choice in zip(quantizers, choices, strict=True):
                assert isinstance(choice, BlockChoice)
                choice = replace(choice, quantizer=choice.quantizer.fixed(tensor.numpy()))
                new = editing.fresh(f"{name}_{choice.format}")
                editing.add_constant(new, _rounded(tensor, choice, new), editing.constants[name])
                node = self._protos[quantizer.node]
                node.domain, node.input[0] = CONSTANT_DOMAIN, new
                if choice.quantizer.tensor_scale is not None and len(node.input) == 1:
                    scale = editing.fresh(f"{new}_scale")
                    editing.add_constant(scale, ir.Tensor(np.array(choice.quantizer.tensor_scale, np.float32)))
                    node.input.append(scale)
                self._marks[new] = replace(quantizer, decide=partial(_same, choice))
                notes[new] = f"was in float behind {node.op_type}: rounded first, the float numbers are not kept"
            editing.remove_constant(name)
        if notes:
            editing.import_domain(CONSTANT_DOMAIN, VERSION)
            define_constant_marks(editing.proto)
        return notes

    def _store_integer_codes(self) -> None:
        """Replace constants behind QuantizeLinear by their codes. They count as packed: they need no unpacking."""
        editing = self.editing
        note = "was in float behind QuantizeLinear: its codes are stored, the float numbers are not kept"
        for name, quantizers in self._behind(
            [quantizer for quantizer in self._quantizers if is_quantize(quantizer.node)]
        ):
            size, nodes = editing.tensor(name).nbytes, [self._protos[quantizer.node] for quantizer in quantizers]
            reason = self._obstacle(name, quantizers)
            types = {quantizer.dtype for quantizer in quantizers if quantizer.dtype is not None} - set(CODES)
            if not reason and not all(input_ in editing.constants for node in nodes for input_ in node.input if input_):
                reason = "its scale or zero point is computed at run time"
            elif not reason and types:
                reason = f"its codes are of type {types.pop().name.lower()}, which is not packed"
            if reason:
                self.left.append(LeftWeight(name, size, reason))
                continue
            for node in nodes:
                codes, new = _codes(editing, node), node.output[0]
                editing.add_constant(new, codes, editing.constants[name])
                editing.graph.node.remove(node)
                shape, kind = tuple(codes.shape.numpy()), codes.dtype
                weight = PackedWeight(new, kind.name.lower(), shape, float(kind.bitwidth), size, codes.nbytes, note)
                self.packed.append(weight)
            editing.remove_constant(name)

    def _behind(self, quantizers: list[Quantizer]) -> list[tuple[str, list[Quantizer]]]:
        """The constants that these quantizers of the main graph read, in their order."""
        by_name: dict[str, list[Quantizer]] = {}
        for quantizer in quantizers:
            name = self._protos[quantizer.node].input[0] if quantizer.node in self._protos else ""
            if name in self.editing.constants:
                by_name.setdefault(name, []).append(quantizer)
        return [(name, by_name[name]) for name in self.editing.order if name in by_name]

    def _obstacle(self, name: str, quantizers: list[Quantizer]) -> str:
        """The reason why the float numbers have to stay; empty if they need not."""
        if name in self.editing.inputs:
            return "it is also an input of the graph, so the caller may pass another value"
        if name in self.editing.outputs:
            return "it is an output of the graph"
        known = [self._protos[quantizer.node] for quantizer in quantizers]
        for node in self.editing.readers(name):
            if not any(node is other for other in known) or list(node.input).count(name) != 1:
                return f"{node.op_type} '{node.name or node.output[0]}' reads it in float as well"
        return ""

    def _pack(self, name: str, mark: Quantizer, note: str, position: int) -> None:
        editing = self.editing
        tensor = editing.tensor(name)
        shape = tuple(tensor.shape.numpy())
        try:
            choice = mark.choice
        except QuarkError as error:
            self.left.append(LeftWeight(name, tensor.nbytes, str(error)))
            return
        assert isinstance(choice, BlockChoice)
        fmt = choice.quantizer.format
        stored: Stored | str = self._float_obstacle(name, tensor) or obstacle(fmt, shape) or self.form.obstacle(fmt)
        if not stored:
            codes = encode(tensor, fmt, choice.axis, choice.quantizer.tensor_scale)
            stored = f"not all of its numbers are in '{fmt}'" if codes is None else self.form.store(name, codes, tensor)
        if isinstance(stored, str):
            self.left.append(LeftWeight(name, tensor.nbytes, stored))
            return
        size = sum(editing.tensor(plane).nbytes for plane in stored.planes.values())
        self.packed.append(PackedWeight(name, str(fmt), shape, 8 * size / tensor.size, tensor.nbytes, size, note))
        attributes: dict[str, Any] = {key: attr.value for key, attr in mark.node.attributes.items()}
        self.records.append(
            WeightRecord(
                name, mark.node.op_type, attributes, shape, int(tensor.dtype), stored.layout, stored.planes,
                stored.values, position,
            )
        )  # fmt: skip

    def _float_obstacle(self, name: str, tensor: ir.TensorProtocol) -> str:
        if name in self.editing.inputs:
            return "it is also an input of the graph, so the caller may pass another value"
        if tensor.dtype not in FLOATS:
            return f"it is of type {tensor.dtype.name.lower()}"
        if tensor.nbytes < 2 * MIN_SAVED_BYTES:
            return f"it has {tensor.nbytes} bytes: the nodes that unpack it would take as many"
        return ""


def _same(choice: BlockChoice) -> BlockChoice:
    return choice


def _rounded(tensor: ir.TensorProtocol, choice: BlockChoice, name: str) -> ir.TensorProtocol:
    """The weight as its quantizer leaves it; computed when it is read, so that not all of them are held."""

    def compute() -> Iterator[NDArray[Any]]:
        yield block_values(np.require(tensor.numpy(), requirements=["C", "A"]), choice)

    return ComputedTensor(compute, tensor.dtype, ir.Shape(tensor.shape.numpy()), name)


def _codes(editing: Editing, node: onnx.NodeProto) -> ir.TensorProtocol:
    """The result of the node, computed by ONNX Runtime with our library."""
    inputs = [name for name in node.input if name]
    tensors = [ir.serde.serialize_tensor(editing.tensor(name)) for name in inputs]
    for name, tensor in zip(inputs, tensors, strict=True):
        tensor.name = name
    # the weight is an input, because the runtime would compute a constant twice
    first = helper.make_tensor_value_info(node.input[0], tensors[0].data_type, tensors[0].dims)
    result = helper.make_empty_tensor_value_info(node.output[0])
    graph = helper.make_graph([node], "codes", [first], [result], tensors[1:])
    model = helper.make_model(graph, opset_imports=editing.proto.opset_import, ir_version=editing.proto.ir_version)
    array = np.ascontiguousarray(editing.tensor(node.input[0]).numpy())
    codes = open_session(model.SerializeToString(), threads=1).run(None, {node.input[0]: array})[0]
    return ir.Tensor(codes, name=node.output[0])
