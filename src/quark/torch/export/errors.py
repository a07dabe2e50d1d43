"""The errors of exporting. Their messages name the layer, and the line of the model's code where that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark.errors import QuarkError

if TYPE_CHECKING:
    from quark.torch.export.parity import ParityReport


class ExportError(QuarkError, RuntimeError):
    """A network that cannot be written as ONNX; the message says which node, and what to do."""


class ParityError(ExportError):
    """The exported file computes something else than the network; `report` has the figures."""

    def __init__(self, message: str, report: ParityReport) -> None:
        super().__init__(message)
        self.report = report
