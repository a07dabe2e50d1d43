"""The front: a configuration, a model and data give a quantized network."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.export import ExportedProgram

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.files.foreign import REPORT, read_json
from quark.mixed_precision import MixedPlan
from quark.plan import QuantizationPlan
from quark.torch.freeze import freeze
from quark.torch.quantization.pipeline import quantize_network
from quark.torch.train.networks import FrozenNetwork, QuantizedNetwork

if TYPE_CHECKING:
    from quark.torch.quantization.config.config import Config


class ModelQuantizer:
    """Quantizes models by one configuration."""

    def __init__(self, config: Config) -> None:
        if not hasattr(config, "settings"):
            raise UnsupportedTypeError(
                f"ModelQuantizer: expected a Config of quark.torch.quantization.config.config, got "
                f"{type(config).__name__}; Config(QuantizationConfig(...)) is one"
            )
        self.config = config
        self._settings = config.settings()

    def quantize_model(
        self,
        model: nn.Module | ExportedProgram,
        dataloader: Iterable[Any] | None = None,
        plan: QuantizationPlan | MixedPlan | str | os.PathLike[str] | None = None,
    ) -> QuantizedNetwork:
        """The model with quantizers in it, calibrated and in eval mode; it trains as any module does.

        `model` is an exported program, its module, or a plain module, which is then traced with the first batch; it is
        left as it is. `dataloader` gives tensors, tuples with labels behind them, or dictionaries; without one, only
        what needs no ranges can be quantized, or random numbers are taken for an exported program, with a warning.
        `plan` is one that quark.onnx made for the ONNX file of the same model, or the file that it lies in: its layers
        get the types that were decided there, and what the plan does not say is the configuration's.
        """
        known = read_plan(plan) if isinstance(plan, (str, os.PathLike)) else plan
        return quantize_network(model, dataloader, self._settings, known)

    @staticmethod
    def freeze(model: QuantizedNetwork | FrozenNetwork) -> FrozenNetwork:
        """The network in eval mode with fixed numbers, ready to be exported."""
        return freeze(model)


def read_plan(path: str | os.PathLike[str]) -> QuantizationPlan | MixedPlan:
    """The plan in a JSON file: one of mixed precision, one of all tensors, or the report that quark.onnx wrote beside a
    quantized file, which holds the second."""
    label = f"plan '{os.fspath(path)}'"
    content = read_json(path, label, REPORT)
    content = content if isinstance(content, dict) else {}
    plan = content.get("plan")
    inner = plan if isinstance(plan, dict) else content
    if "layers" in inner:
        return MixedPlan.from_dict(inner, label)
    if "tensors" in inner:
        return QuantizationPlan.from_dict(inner, label)
    raise InvalidValueError(
        f"{label}: expected a plan (with 'tensors' or 'layers') or the report of a quantized ONNX file"
    )
