"""Large weights that a step has computed, in a temporary file instead of memory.

A rewrite that folds a normalization, or an algorithm that rescales channels, gives layers new weights. Those of a large
model are written to files without a name, which the system removes with the process, and mapped.
"""

from __future__ import annotations

import tempfile
from typing import IO, Any

import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.input_files import MappedFile
from quark.onnx.large_tensors import MappedTensor, byte_pieces, is_large_model, is_large_tensor
from quark.text import get_logger

_LOG = get_logger(__name__)
_SPILL = "quark.onnx.spill"  # in the model's meta store
_SEGMENT_BYTES = 1 << 30  # of one file, and one mapping: a mapping takes a descriptor, of which there are not many
_ALIGNMENT = 4096


def kept(model: ir.Model, array: NDArray[Any], name: str) -> ir.TensorProtocol:
    """A tensor of the array for this model: in memory, or in a file where the model is large and so is the array."""
    tensor = ir.Tensor(array, name=name)
    if not is_large_tensor(tensor) or tensor.dtype.bitwidth < 8 or not is_large_model(model):
        return tensor
    try:
        spill: _Spill = model.meta.setdefault(_SPILL, _Spill())
        return spill.put(tensor)
    except OSError as error:
        _LOG.info("'%s' stays in memory, there is no room for it in a temporary file: %s", name, error)
        return tensor


class _Spill:
    """Files of a fixed size, filled one after the other; they have no content, and take no room, where nothing is."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._mapping: MappedFile | None = None
        self._end = 0

    def put(self, tensor: ir.Tensor[Any]) -> MappedTensor:
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if self._file is None or self._mapping is None or offset + tensor.nbytes > len(self._mapping):
            self._file, offset = tempfile.TemporaryFile(prefix="quark-"), 0  # noqa: SIM115 - open as long as it is mapped
            self._file.truncate(max(_SEGMENT_BYTES, tensor.nbytes))
            self._mapping = MappedFile(self._file.fileno(), 0, access=1)
        self._file.seek(offset)
        for piece in byte_pieces(tensor):
            self._file.write(piece)
        self._file.flush()
        self._end = offset + tensor.nbytes
        return MappedTensor(self._mapping, offset, tensor.dtype, ir.Shape(tensor.shape.numpy()), tensor.name)
