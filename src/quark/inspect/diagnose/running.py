"""Run models for some of their tensors, several samples at a time.

Values stay where the runtime wrote them, and go from one network to the other without a copy. Two workers with half of
the processors each run the samples. Results are combined in the order of the samples, so they do not depend on which
worker was first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.calibrate.runner import THREADS, Tensor
from quark.onnx.input_files import held_still
from quark.onnx.large_tensors import mapped_files
from quark.onnx.session import open_session, release_memory, run_shared, running

Array = NDArray[Any]
FLOATS = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}


class Run:
    """A session whose outputs are `names`; `what` is what errors call the model."""

    def __init__(
        self, model: ir.Model, what: str, *, extra: Sequence[str] = (), has_integer_kernels: bool = False
    ) -> None:
        self._what = what
        self._files = mapped_files(model)
        for value in model.graph.inputs:
            if value.type is None:  # inference does not find every type
                value.type = ir.TensorType(ir.DataType.FLOAT)
        self._session = open_session(
            model, extra_outputs=extra, threads=THREADS, has_integer_kernels=has_integer_kernels
        )
        release_memory()  # constant folding took as much memory as the weights
        self.names: list[str] = [output.name for output in self._session.get_outputs()]
        self.inputs: list[str] = [argument.name for argument in self._session.get_inputs()]
        self._floats = {
            argument.name: FLOATS[argument.type] for argument in self._session.get_inputs() if argument.type in FLOATS
        }  # a float16 network is quantized as a float32 one, which is fed the tensors of the other

    def __call__(self, feeds: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Array]:
        """Return the tensors of these names, or all outputs. Feeds that the model does not read are left out."""
        wanted = self.names if names is None else list(names)
        given = {name: np.asarray(feeds[name], self._floats.get(name), order="C") for name in self.inputs}
        with held_still(self._files), running(self._what):
            values = run_shared(self._session, wanted, given)
        return {name: Tensor(value).array for name, value in zip(wanted, values, strict=True)}
