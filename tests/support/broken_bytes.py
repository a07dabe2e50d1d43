"""Content made wrong, by a random generator: bytes, protobuf messages, JSON and archives of numpy.

Every function takes what is right and gives something that is wrong in one or a few places, or by chance still right.
The same generator gives the same content.
"""

from __future__ import annotations

import io
import itertools
import json
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Random = np.random.Generator

NUMBERS = [0, 1, 2, 3, 7, 13, 16, 17, 255, 1000, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -1, -2, -(2**31), -(2**63)]
TEXTS = ["", "x", "\0", "..", "../x", "/etc/passwd", "é" * 40, "ai.onnx", "com.example", "-5", "99999999999999999999"]
TEXTS += ["Conv", "QuantizeLinear", "If", "Identity", "nan", "1e999", "%s{}\n", "\ud7ff", "a" * 3000]
VARINTS = [b"\0", b"\x7f", b"\xff\x01", b"\xff" * 9 + b"\x01", b"\xff" * 4 + b"\x0f", b"\x80" * 9 + b"\x01"]
DEEP = 3000  # brackets: beyond what Python's parsers take


def broken_bytes(rng: Random, content: bytes, other: bytes) -> bytes:
    """Bits flipped, bytes set, parts cut out, doubled, or taken from `other`; or the end cut off."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        if not data:
            return bytes(data)
        place = int(rng.integers(len(data)))
        length = int(rng.integers(1, 40))
        kind = rng.integers(7)
        if kind == 0:
            data[place] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[place] = int(rng.integers(256))
        elif kind == 2:
            del data[place : place + length]
        elif kind == 3:
            data[place:place] = data[place : place + length]
        elif kind == 4:
            start = int(rng.integers(max(1, len(other))))
            data[place : place + length] = other[start : start + length]
        elif kind == 5:
            data[place : place + 1] = VARINTS[rng.integers(len(VARINTS))]
        elif rng.random() < 0.3:
            del data[place:]
    return bytes(data)


def broken_message(rng: Random, model: onnx.ModelProto) -> bytes:
    """A model with one to three fields changed: a number, a text, a type, a part left out, doubled or exchanged."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for _ in range(int(rng.integers(1, 4))):
        messages = list(_messages(changed))
        # few of the many messages are tensors or attributes, which are the more interesting ones
        chosen = [message for message in messages if _is_interesting(message)] if rng.random() < 0.5 else messages
        _change_field(rng, (chosen or messages)[rng.integers(len(chosen or messages))], messages)
    return bytes(changed.SerializeToString())


def hostile_message(rng: Random, model: onnx.ModelProto) -> bytes:
    """A model that costs more than it should: tiny fields, equal names, functions of functions, values that are no
    tensors, parts that come twice, layers of sizes and types that nobody has."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    kind = rng.integers(6)
    count = int(10 ** rng.uniform(0, 5))
    if kind == 0:  # so many empty fields of any number, in a message of the model, the graph, a node or a tensor
        tiny = bytes([int(rng.integers(1, 16)) << 3 | int(rng.choice([0, 2])), 0]) * count
        target = [changed, graph, *graph.node, *graph.initializer][int(rng.integers(2 + len(graph.node)))]
        target.MergeFromString(tiny)
    elif kind == 1:
        parts = [graph.node, graph.initializer, graph.input, graph.output, graph.value_info, changed.opset_import]
        chosen = parts[rng.integers(len(parts))]
        if rng.random() < 0.5 and chosen is graph.node:
            for node in graph.node:
                node.name = "same"
        for _ in range(min(count, 5000) if len(chosen) else 0):
            chosen.add().CopyFrom(chosen[0])
    elif kind == 2:
        _add_functions(rng, changed)
    elif kind == 3:
        _nest_types(rng, graph)
    elif kind == 4:  # protobuf merges what is there twice
        once = changed.SerializeToString()
        again = onnx.ModelProto(graph=graph).SerializeToString()
        return bytes(once + [once, again, once[len(once) // 2 :]][rng.integers(3)])
    else:
        numbers = [0, 0, 1, 127, 2**31]
        for tensor in graph.initializer:
            if rng.random() < 0.5:
                tensor.data_type = int(rng.choice([1, 8, 10, 11, 16]))
                tensor.dims.extend([numbers[rng.integers(len(numbers))]] * int(rng.choice([0, 1, 70, count])))
    return bytes(changed.SerializeToString())


def _nest_types(rng: Random, graph: onnx.GraphProto) -> None:
    """Turn the types of up to two values into sequences, optionals and maps of each other."""
    infos = [*graph.input, *graph.output, *graph.value_info]
    for info in infos[int(rng.integers(len(infos))) :][:2]:
        inner = onnx.TypeProto()
        inner.CopyFrom(info.type)
        for _ in range(int(rng.choice([1, 1, 2, 40]))):
            outer = onnx.TypeProto()
            name = ["sequence_type", "optional_type"][rng.integers(2)]
            getattr(outer, name).elem_type.CopyFrom(inner)
            if rng.random() < 0.2:
                outer.map_type.key_type = 7
                outer.map_type.value_type.CopyFrom(inner)
            inner = outer
        info.type.CopyFrom(inner)
    if graph.node and rng.random() < 0.5:
        graph.node.add(op_type="SequenceConstruct", input=[graph.output[0].name], output=["sequence"])
        graph.output.add(name="sequence").type.sequence_type.elem_type.tensor_type.elem_type = 1


def _add_functions(rng: Random, model: onnx.ModelProto) -> None:
    """Functions that call each other, the first one from a node of the graph; some call those before them."""
    depth, calls = int(rng.integers(1, 40)), int(rng.integers(1, 5))
    model.opset_import.add(domain="f", version=1)
    for level in range(depth):
        function = model.functions.add(domain="f", name=f"f{level}", input=["a"], output=["b"])
        function.opset_import.extend(model.opset_import)
        names = ["a", *(f"t{index}" for index in range(1, calls)), "b"]
        for before, after in itertools.pairwise(names):
            other = int(rng.integers(level + 1)) if rng.random() < 0.02 else level + 1
            is_last = other >= depth
            function.node.add(
                op_type="Relu" if is_last else f"f{other}",
                domain="" if is_last else "f",
                input=[before],
                output=[after],
            )
    if model.graph.input:
        model.graph.node.add(op_type="f0", domain="f", input=[model.graph.input[0].name], output=["called"])


def _is_interesting(message: Message) -> bool:
    return isinstance(message, (onnx.TensorProto, onnx.AttributeProto, onnx.NodeProto, onnx.StringStringEntryProto))


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, content in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in [content] if isinstance(content, Message) else content:
                yield from _messages(each)


def _change_field(rng: Random, message: Message, messages: list[Message]) -> None:
    fields = list(message.DESCRIPTOR.fields)
    present = [field for field, _ in message.ListFields()]
    candidates = present if present and rng.random() < 0.8 else fields
    chosen = candidates[rng.integers(len(candidates))]
    if rng.random() < 0.15:
        message.ClearField(chosen.name)
    elif chosen.type == FieldDescriptor.TYPE_MESSAGE:
        _change_part(rng, message, chosen, messages)
    elif _is_repeated(chosen):
        _change_list(rng, getattr(message, chosen.name), chosen)
    else:
        setattr(message, chosen.name, _value(rng, chosen, getattr(message, chosen.name)))


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED


def _change_part(rng: Random, message: Message, field: FieldDescriptor, messages: list[Message]) -> None:
    """Put another message of the same type in the place, or one more; or take one away."""
    same = [message for message in messages if message.DESCRIPTOR is field.message_type]
    if not same:
        return
    donor = type(same[0])()
    donor.CopyFrom(same[rng.integers(len(same))])
    if not _is_repeated(field):
        getattr(message, field.name).CopyFrom(donor)
        return
    content = getattr(message, field.name)
    kind = rng.integers(3)
    if kind == 0 or not len(content):
        content.add().CopyFrom(donor)
    elif kind == 1:
        content[int(rng.integers(len(content)))].CopyFrom(donor)
    else:
        del content[int(rng.integers(len(content)))]


def _change_list(rng: Random, content: Any, field: FieldDescriptor) -> None:
    place = int(rng.integers(len(content))) if len(content) else None
    kind = rng.integers(4)
    if place is None or kind == 0:
        content.append(_value(rng, field, None))
    elif kind == 1:
        del content[place]
    elif kind == 2:
        content[place] = content[int(rng.integers(len(content)))]
    else:
        content[place] = _value(rng, field, content[place])


def _value(rng: Random, field: FieldDescriptor, old: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXTS[rng.integers(len(TEXTS))]
    if field.type == FieldDescriptor.TYPE_BYTES:
        return broken_bytes(rng, old or b"", b"") if old and rng.random() < 0.7 else b"\xff" * int(rng.integers(40))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return float(rng.choice([0.0, -1.0, np.inf, np.nan, 1e38]))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return field.enum_type.values[rng.integers(len(field.enum_type.values))].number
    number = NUMBERS[rng.integers(len(NUMBERS))]
    if field.type == FieldDescriptor.TYPE_INT32:
        return int(np.int64(number).astype(np.int32))
    if field.type == FieldDescriptor.TYPE_UINT64:
        return abs(number)
    near = old is not None and abs(int(old)) < 2**62 and rng.random() < 0.3
    return int(old) + int(rng.integers(-1, 2)) if near else number


def broken_json(rng: Random, text: str) -> str:
    """Values exchanged for others of any type, keys renamed, entries left out; or broken as text."""
    if rng.random() < 0.25:
        return broken_bytes(rng, text.encode(), b'{"a": [1, 2, null]}').decode("utf-8", "surrogateescape")
    if rng.random() < 0.03:
        return "[" * DEEP + "]" * DEEP
    content = json.loads(text)
    for _ in range(int(rng.integers(1, 3))):
        content = _changed_value(rng, content)
    return json.dumps(content)


def _changed_value(rng: Random, value: Any) -> Any:
    """Go down a random way, and change what is there."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[rng.integers(len(keys))]
        kind = rng.random()
        if kind < 0.06:
            del value[key]
        elif kind < 0.1 and isinstance(value, dict):
            value[TEXTS[rng.integers(len(TEXTS))]] = value.pop(key)
        else:
            value[key] = _changed_value(rng, value[key])
        return value
    others: list[Any] = [None, True, -1, 0, 3, 2**70, 10**4000, 1.5, 1e308, float("nan"), float("inf"), "", "int8"]
    others += ["../x", [], {}, [[]], [1, "a"], {"a": 1}, {"name": {}}, ["x"] * 3, "a" * 2000, value]
    return others[rng.integers(len(others))]


def broken_archive(rng: Random, arrays: dict[str, Any]) -> bytes:
    """An .npz archive: broken as bytes, or with an entry whose header lies, or with an entry that is no array."""
    whole = io.BytesIO()
    np.savez(whole, **arrays)
    if rng.random() < 0.5:
        return broken_bytes(rng, whole.getvalue(), b"PK\x03\x04\x14" * 9)
    result = io.BytesIO()
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(result, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if rng.random() < 0.6:
                content = _broken_entry(rng, content)
            target.writestr(f"x{TEXTS[rng.integers(len(TEXTS))]}" if rng.random() < 0.1 else name, content)
    return result.getvalue()


def _broken_entry(rng: Random, content: bytes) -> bytes:
    kind = rng.integers(4)
    if kind == 0:
        return broken_bytes(rng, content, b"\x93NUMPY\x01\x00")
    shapes = ["(1000000000000,)", "(-1,)", "(2, 3)", "()", "(99999999999999999999,)", "(0, 0)", "(1,) * 9", "None"]
    types = ["'<f4'", "'|O'", "'<f8'", "'<U9'", "'<c8'", "'|b1'", "'<M8[s]'", "[('a', '<f4')]", "'zzz'", "3"]
    shape, kind_text = shapes[rng.integers(len(shapes))], types[rng.integers(len(types))]
    header = f"{{'descr': {kind_text}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + content[128:]
