"""What a model wants to be fed: names, types and shapes of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.errors import ModelError


@dataclass(frozen=True)
class InputInfo:
    """One input. A dimension of `shape` is a size, a name, or None where nothing is known; `shape` None: any rank."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int | str | None, ...] | None

    @property
    def batch(self) -> int | None:
        """The fixed size of the first axis; None where it is free."""
        return self.shape[0] if self.shape and isinstance(self.shape[0], int) else None

    def __str__(self) -> str:
        dims = "any shape" if self.shape is None else "x".join("?" if d is None else str(d) for d in self.shape)
        return f"'{self.name}' ({self.dtype.name}, {dims or 'scalar'})"


def input_infos(model: ir.Model) -> tuple[InputInfo, ...]:
    """The inputs that a user has to feed, in the order of the graph; those with an initializer need not be."""
    return tuple(_info(value) for value in model.graph.inputs if value.name not in model.graph.initializers)


def list_inputs(inputs: Sequence[InputInfo]) -> str:
    return ", ".join(str(each) for each in inputs)


def _info(value: ir.Value) -> InputInfo:
    if value.dtype in (None, ir.DataType.UNDEFINED):
        raise ModelError(f"input '{value.name}' has no type of tensor; only tensors can be fed. Export the model again")
    shape = None
    if value.shape is not None:
        shape = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
    return InputInfo(value.name or "", np.dtype(value.dtype.numpy()), shape)
