"""The options of loading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadOptions:
    """`opset` None keeps the model's where it is at least 13. `fixed_shapes` gives symbolic dimensions of inputs a
    size: (input name, shape) pairs, or a lone shape for every input under the name ''."""

    opset: int | None = None
    has_fp16_converted: bool = False  # float16 weights and activations become float32 before anything else
    fixed_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    has_initializers_as_inputs: bool = False  # keep initializers that are also inputs as inputs: then they may change
