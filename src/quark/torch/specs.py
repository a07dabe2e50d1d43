"""Typed settings of a run on a torch network.

`quantization/config` makes `Settings` out of what a user wrote; the steps read nothing else. Single tensors are
described by the specs of `quark.decide.specs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quark.decide.end_layers import EndLayers
from quark.decide.options import ChoiceOptions, Selection, SelectionWords, Target
from quark.decide.specs import AffineSpec, LayerSpec
from quark.features.bias_correction.options import TorchBiasCorrectionOptions
from quark.features.equalization.options import CrossLayerOptions
from quark.npu.rules import POOLS

_ENOUGH_BITS = 8  # enough for a bias that is rounded to the steps of the sums
_WORDS = SelectionWords(excluded_nodes="exclude", by_node="layer_quant_config", extra_op_types="", everywhere="")


@dataclass(frozen=True)
class KvCacheOptions:
    """Quantization of the keys and values that attention keeps. `by_name` has patterns for projections and replaces
    what the settings say of them; its outputs are the keys and values. Those of a layer that match `shared` have one
    scale. No scale is below `least_scale`. `is_post_rope`: quantized when they enter the cache, after their positions
    were rotated in, and not where the projections return them."""

    by_name: Mapping[str, LayerSpec]
    shared: tuple[str, ...] = ()
    least_scale: float = 0.0
    is_post_rope: bool = False


@dataclass(frozen=True)
class Settings:
    """`by_name` has patterns for module paths and node names. It takes precedence over `by_node`, which has what a plan
    says of single nodes, and that over `by_type`, which has names of torch.nn classes. None leaves a layer in float, as
    `exclude` does."""

    specs: LayerSpec
    by_type: Mapping[str, LayerSpec | None] = field(default_factory=dict)
    by_name: Mapping[str, LayerSpec | None] = field(default_factory=dict)
    by_node: Mapping[str, LayerSpec | None] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    equalize: CrossLayerOptions | None = None
    correct_biases: TorchBiasCorrectionOptions | None = None
    applies_npu_rules: bool = False
    seed: int = 0
    kv_cache: KvCacheOptions | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)  # options of other features of features/order.py
    ends: EndLayers | None = None  # wider types for the first and the last layers

    def options_of(self, feature: str) -> Any:
        """The options of a feature of features/order.py; None if it is off."""
        own = {"equalization": self.equalize, "bias_correction": self.correct_biases}
        return own[feature] if feature in own else self.features.get(feature)

    @property
    def choose(self) -> ChoiceOptions:
        """The same for `quark.decide`. If several patterns match a layer, the first one wins."""
        names = list(reversed(list(self.by_name.items())))
        pools = POOLS if self.applies_npu_rules else ("MaxPool",)
        return ChoiceOptions(
            self._with_bias(self.specs),
            by_op_type=tuple((name, spec and self._with_bias(spec)) for name, spec in self.by_type.items()),
            by_plan=tuple((name, spec and self._with_bias(spec)) for name, spec in self.by_node.items()),
            by_node=tuple((name, spec and self._with_bias(spec)) for name, spec in names),
            selection=Selection(excluded_nodes=self.exclude, words=_WORDS),
            target=Target.NPU_CNN if self.applies_npu_rules else Target.ONNX_RUNTIME,
            aligned=frozenset({"Concat", "Pad", "Slice", "Transpose", "Reshape", *pools}),
            has_activation_constants=True,
            is_trained=True,
            has_lowest_code=True,
            ends=self.ends,
        )

    def _with_bias(self, layer: LayerSpec) -> LayerSpec:
        """Integers are summed in 32 bits, and so is a bias of which nothing is said: ONNX Runtime rounds a float one by
        itself. With fewer than 8 bits those steps would be coarse, and the bias stays float."""
        if layer.bias is not None or self.applies_npu_rules:
            return layer
        operands = (layer.activation, layer.weight)
        has_sums = all(isinstance(operand, AffineSpec) and operand.integer.bits >= _ENOUGH_BITS for operand in operands)
        return replace(layer, bias=AffineSpec("int32")) if has_sums else layer
