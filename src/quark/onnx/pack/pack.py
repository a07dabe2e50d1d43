"""Pack: the weights of a quantized file in the bits that their formats say.

A weight keeps its name: where an initializer was, nodes make a value of that name from smaller tensors. So whoever read
it, in a subgraph too, reads the same numbers as before.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir

from quark.errors import ModelError, QuarkError, unknown_name
from quark.onnx.input_files import check_unchanged
from quark.onnx.message import Message
from quark.onnx.pack.block_codes import encode, obstacle
from quark.onnx.pack.editing import Editing
from quark.onnx.pack.facts import LeftWeight, PackedWeight, PackFacts, Profile
from quark.onnx.pack.packed_forms import CustomForm, Form, NativeForm, PortableForm
from quark.onnx.pack.quantized_weights import round_block_weights, store_integer_codes
from quark.onnx.pack.record import Record, WeightRecord, is_packed, write_record
from quark.onnx.pack.source import read_message
from quark.onnx.save import SaveOptions, check_output, together, write_model
from quark.ops.constant_marks import is_constant_mark
from quark.ops.onnx_nodes import all_nodes, node_attributes, subgraphs
from quark.ops.schema import quantizer_of

MIN_OPSET = 13
MIN_SAVED_BYTES = 1024  # about what the nodes and the names of a packed weight take
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
INTEGERS = (
    ir.DataType.INT8,
    ir.DataType.UINT8,
    ir.DataType.INT16,
    ir.DataType.UINT16,
    ir.DataType.INT4,
    ir.DataType.UINT4,
)

UNMARKED = "it is in no block format"

FORMS: dict[Profile, type[PortableForm] | type[CustomForm] | type[NativeForm]] = {
    Profile.PORTABLE: PortableForm,
    Profile.CUSTOM: CustomForm,
    Profile.NATIVE: NativeForm,
}


def pack_model(
    source: str | os.PathLike[str], target: str | os.PathLike[str], profile: str | Profile = Profile.PORTABLE
) -> PackFacts:
    """Pack a quantized file into another one, which is written whole or not at all.

    The input is never overwritten. A file that is packed already is a ModelError; so is one with nothing to pack.
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
    """The same in memory: a message of its own with smaller weights, and what was done. Where there is nothing to pack,
    the message itself, and a remark that says why."""
    chosen = profile_of(profile)
    if is_packed(message.proto):
        raise ModelError("the model is packed already; 'quark unpack' gives the model that it was packed from")
    editing = Editing(message)
    if editing.opset < MIN_OPSET:
        raise ModelError(f"the model has opset {editing.opset}, and packing needs {MIN_OPSET} or later: convert it")
    before = sum(editing.tensor(name).nbytes for name in editing.order)
    ir_version = editing.proto.ir_version
    packing = _Packing(editing, FORMS[chosen](editing))
    packing.run()
    if not packing.packed:
        return message, PackFacts(chosen.value, (), tuple(packing.left), before, before, (_nothing_to_pack(packing),))
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
        raise unknown_name("profile", profile, [each.value for each in Profile]) from error


class _Packing:
    """One run over the weights of a model."""

    def __init__(self, editing: Editing, form: Form) -> None:
        self.editing, self.form = editing, form
        self.packed: list[PackedWeight] = []
        self.left: list[LeftWeight] = []
        self.records: list[WeightRecord] = []
        self.remarks: list[str] = []
        self.positions: dict[str, int] = {}

    def run(self) -> None:
        editing = self.editing
        notes, left = round_block_weights(editing)
        codes, more = store_integer_codes(editing)
        self.left += [*left, *more]
        self._note_codes(codes)
        marks = _marks(editing)
        self.positions = {name: index for index, name in enumerate(editing.order)}
        for name in [each for each in editing.order if each in marks]:
            self._pack(name, marks[name], notes.get(name, ""))
        self._note_rest()

    def _pack(self, name: str, mark: onnx.NodeProto, note: str) -> None:
        editing = self.editing
        tensor = editing.tensor(name)
        attributes: dict[str, Any] = dict(node_attributes(mark))
        try:
            quantizer, axis, _ = quantizer_of(mark.op_type, attributes)
        except QuarkError as error:
            self.left.append(LeftWeight(name, tensor.nbytes, str(error)))
            return
        fmt, shape = quantizer.format, tuple(tensor.shape.numpy())
        reason = self._obstacle(name, tensor) or obstacle(fmt, shape) or self.form.obstacle(fmt)
        codes = None if reason else encode(tensor, fmt, axis)
        if codes is None:
            reason = reason or f"not all of its numbers are in '{fmt}'"
            self.left.append(LeftWeight(name, tensor.nbytes, reason))
            return
        stored = self.form.store(name, codes, tensor)
        if isinstance(stored, str):
            self.left.append(LeftWeight(name, tensor.nbytes, stored))
            return
        size = sum(editing.tensor(each).nbytes for each in stored.planes.values())
        bits = 8 * size / tensor.size
        self.packed.append(PackedWeight(name, str(fmt), shape, bits, tensor.nbytes, size, note))
        self.records.append(
            WeightRecord(
                name, mark.op_type, attributes, shape, int(tensor.dtype), stored.layout, stored.planes, stored.values,
                self.positions[name],
            )
        )  # fmt: skip

    def _obstacle(self, name: str, tensor: ir.TensorProtocol) -> str:
        if name in self.editing.inputs:
            return "it is an input of the graph as well: whoever runs the model may give another"
        if tensor.dtype not in FLOATS:
            return f"it is of type {tensor.dtype.name.lower()}"
        if tensor.nbytes < 2 * MIN_SAVED_BYTES:
            return f"it has {tensor.nbytes} bytes: the nodes that unpack it would take as many"
        return ""

    def _note_codes(self, codes: dict[str, tuple[int, ir.TensorProtocol]]) -> None:
        """What was stored as codes counts as packed: it is smaller, and needs no unpacking."""
        for name, (size, tensor) in codes.items():
            note = "was in float behind QuantizeLinear: its codes are stored, the float numbers are not kept"
            shape = tuple(tensor.shape.numpy())
            bits = float(tensor.dtype.bitwidth)
            kind = tensor.dtype.name.lower()
            self.packed.append(PackedWeight(name, kind, shape, bits, size, tensor.nbytes, note))

    def _note_rest(self) -> None:
        """Large constants that nothing was said about."""
        editing = self.editing
        known = {each.name for each in self.packed} | {each.name for each in self.left}
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
        inside = sum(_is_marked_inside(graph) for node in editing.graph.node for graph in subgraphs(node))
        if inside:
            self.remarks.append(f"{inside} marked weights are constants of subgraphs, which are left as they are")


def _marks(editing: Editing) -> dict[str, onnx.NodeProto]:
    """The marked constants of the main graph, each with the first mark on it."""
    marks: dict[str, onnx.NodeProto] = {}
    for node in all_nodes(editing.graph.node):
        if is_constant_mark(node) and node.input[0] in editing.constants:
            marks.setdefault(node.input[0], node)
    return marks


def _is_marked_inside(graph: onnx.GraphProto) -> int:
    own = {tensor.name for tensor in graph.initializer}
    count = sum(is_constant_mark(node) and node.input[0] in own for node in graph.node)
    return count + sum(_is_marked_inside(inner) for node in graph.node for inner in subgraphs(node))


def _nothing_to_pack(packing: _Packing) -> str:
    """The reason that there is, and what to do."""
    if packing.remarks:
        return f"there is nothing to pack: {packing.remarks[0]}"
    reasons = [each for each in packing.left if each.reason != UNMARKED]
    if not reasons:
        return "there is nothing to pack: no weight is in a block format. Quantize the model first, say to MXFP4E2M1"
    largest = max(reasons, key=lambda each: each.bytes)
    return f"there is nothing to pack. The largest weight is '{largest.name}': {largest.reason}"
