"""The options of learned rounding."""

from __future__ import annotations

from dataclasses import dataclass

from quark.features.feature import Feature


@dataclass(frozen=True)
class SignRoundingOptions:
    """`steps` of signed gradient descent for a layer, each on `batch_size` batches of the data. The rates, of offsets
    and of clipped ranges, fall to zero. `has_clipping`: ranges are learned as well. `modules` are paths in a layer,
    all if empty; `decoder_layers` is the path of the list of layers, if it is not to be found."""

    steps: int = 200
    rate: float = 1 / 200
    has_clipping: bool = True
    clip_rate: float = 1 / 200
    batch_size: int = 8
    modules: tuple[str, ...] = ()
    decoder_layers: str = ""

    @property
    def needs_exact_inputs(self) -> bool:
        """True: outputs are compared with the float network's."""
        return True


FEATURE = Feature("sign_rounding", nouns={"learned rounding": "layer"})
