"""What an NPU's integer units make of a config: limits on positions, and operators as the unit computes them.

Both are on by themselves where `enable_npu_cnn` is set and scales are powers of two; elsewhere they can be asked for:
positions by NPULimitationCheck, operators by SimulateDPU (those that are usual) or each by its own option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quark.npu import RULE_NAMES
from quark.onnx.choose.options import PositionOptions
from quark.onnx.choose.specs import AffineSpec, LayerSpec
from quark.onnx.simulate.options import SimulateOptions

# What is about positions alone; the rules that align mean something without them, too.
_STEERING = {"NPULimitationCheck", "MaxLoopNum", *(name for name in RULE_NAMES if not name.startswith("Align"))}
NO_POSITIONS = "it is about the positions of power-of-two scales, which these types do not have"
NO_CHECK = "NPULimitationCheck is False, so that there is nothing for it to steer"


@dataclass(frozen=True)
class NpuOptions:
    positions: PositionOptions | None
    simulate: SimulateOptions
    remarks: tuple[str, ...]


def npu_options(values: Mapping[str, Any], is_for_npu: bool, layer: LayerSpec) -> NpuOptions:
    """From the values of those options that were given. `layer` is what most tensors are."""
    has_positions = all(
        isinstance(each, AffineSpec) and each.is_power_of_two for each in (layer.activation, layer.weight)
    )
    is_usual = is_for_npu and has_positions
    is_checked = values.get("NPULimitationCheck", is_usual)
    simulate = _simulate_options(values, is_usual)
    if has_positions and is_checked:
        return NpuOptions(_position_options(values), simulate, ())
    reason = NO_CHECK if has_positions else NO_POSITIONS
    unused = [name for name, value in values.items() if name in _STEERING and value is not False]
    return NpuOptions(None, simulate, tuple(f"{name}: {reason}" for name in unused))


def _position_options(values: Mapping[str, Any]) -> PositionOptions:
    rules = frozenset(rule for rule in RULE_NAMES if values.get(rule, True))
    limit = {"max_rounds": values["MaxLoopNum"]} if "MaxLoopNum" in values else {}
    return PositionOptions(rules, **limit)


def _simulate_options(values: Mapping[str, Any], is_usual: bool) -> SimulateOptions:
    from quark.onnx.simulate import DEFAULT_SUBSTITUTIONS, SUBSTITUTION_OF_OPTION

    chosen = set(DEFAULT_SUBSTITUTIONS if values.get("SimulateDPU", is_usual) else ())
    for option, substitution in SUBSTITUTION_OF_OPTION.items():
        if option in values:
            chosen.add(substitution) if values[option] else chosen.discard(substitution)
    return SimulateOptions(frozenset(chosen))
