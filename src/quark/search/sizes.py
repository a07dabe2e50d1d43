"""How large a quantized file really is.

Packed, where this quark can: then it is the size on the disk. Else weights in blocks and in 16 bits lie in the file as
float32, and the size is what it would be with the bits that their formats have.
"""

from __future__ import annotations

import math
from pathlib import Path

import onnx

from quark.formats.catalog import get_format
from quark.plan import AffineChoice, BlockChoice, DynamicChoice, QuantizationPlan, Role

PROFILE = "portable"


def stored_bytes(path: Path) -> int:
    """A model with the weights beside it."""
    beside = path.parent.glob(f"{path.stem}-????????????.data")
    return path.stat().st_size + sum(each.stat().st_size for each in beside)


def bytes_by_formats(path: Path, plan: QuantizationPlan) -> int:
    """The size of the file less what its weights have beyond their formats' bits."""
    proto = onnx.load(path, load_external_data=False)
    sizes = {each.name: (math.prod(each.dims), each.data_type) for each in proto.graph.initializer}
    saved = 0.0
    for name, bits in _weight_bits(plan).items():
        count, kind = sizes.get(name, (0, onnx.TensorProto.FLOAT))
        if kind == onnx.TensorProto.FLOAT:
            saved += count * (32.0 - bits) / 8
    return stored_bytes(path) - int(saved)


def _weight_bits(plan: QuantizationPlan) -> dict[str, float]:
    """By the initializer that holds what a weight became; under either name that `insert` gives it."""
    bits: dict[str, float] = {}
    for each in plan:
        if each.role is not Role.WEIGHT or isinstance(each.choice, (AffineChoice, DynamicChoice)):
            continue  # integers are stored as such
        choice = each.choice
        fmt = choice.quantizer.format if isinstance(choice, BlockChoice) else get_format(choice.format)
        for name in (each.tensor, f"{each.tensor}_{choice.format}"):
            bits[name] = fmt.bits_per_element
    return bits
