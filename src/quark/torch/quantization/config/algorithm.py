"""The accuracy algorithms that a Config can list; those of AMD's that are not carried out are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias

from quark.errors import (
    InvalidValueError,
    UnsupportedOptionError,
    UnsupportedTypeError,
    refuse_unknown_fields,
    unknown_name,
)
from quark.features.bias_correction.options import TorchBiasCorrectionOptions
from quark.features.equalization.options import ClipTreatment, CrossLayerOptions
from quark.features.feature import Feature
from quark.features.order import FEATURES
from quark.features.smooth_quant.options import SmoothOptions


@refuse_unknown_fields
@dataclass(frozen=True)
class AlgoConfig:
    """An algorithm with its settings."""

    name: ClassVar[str] = ""
    feature: ClassVar[str] = ""  # its folder, see features/order.py

    def to_dict(self) -> dict[str, Any]:
        """Its name and settings, as JSON can hold them."""
        return {"name": self.name, **asdict(self)}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> AlgoConfig:
        """What `to_dict` wrote; settings that are missing have their defaults."""
        settings = dict(content)
        name = settings.pop("name", None)
        if name in _REFUSED:
            raise _refusal(str(name))
        algorithms = {**ALGORITHMS, **{each.folder: each.options for each in FEATURES if each.switch}}
        if name not in algorithms:
            raise unknown_name("algorithm", name, algorithms)
        known = [each.name for each in fields(algorithms[name])]
        for key in settings:
            if key not in known:
                raise unknown_name(f"setting of algorithm '{name}'", key, known)
        return algorithms[name](**settings)  # type: ignore[no-any-return]


@refuse_unknown_fields
@dataclass(frozen=True)
class CLEConfig(AlgoConfig):
    """Cross-layer equalization: `steps` sweeps over all pairs of layers; -1: until they settle."""

    name: ClassVar[str] = "cle"
    feature: ClassVar[str] = "equalization"
    steps: int = CrossLayerOptions.steps

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> CrossLayerOptions:
        steps = self.steps
        if isinstance(steps, bool) or not isinstance(steps, int) or (steps < 1 and steps != -1):
            raise InvalidValueError(f"steps {steps!r}: expected 1 or more, or -1 to go on until they settle")
        return CrossLayerOptions(steps, clip=ClipTreatment.CALIBRATED)


@refuse_unknown_fields
@dataclass(frozen=True)
class BiasCorrectionConfig(AlgoConfig):
    """Biases corrected by the mean error of their layer's output, over at most so many `samples`."""

    name: ClassVar[str] = "bias_correction"
    feature: ClassVar[str] = "bias_correction"
    samples: int = TorchBiasCorrectionOptions.samples

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> TorchBiasCorrectionOptions:
        return TorchBiasCorrectionOptions(self.samples)


@refuse_unknown_fields
@dataclass(frozen=True)
class SmoothQuantConfig(AlgoConfig):
    """SmoothQuant; `alpha`, from 0 to 1, is the share of the difficulty that moves from activations to weights.

    Layers, and what computes their inputs, are found in the graph, and no two scales of a tensor are further apart than
    a factor of 1024. The other fields of AMD's class are therefore accepted with their defaults only.
    """

    name: ClassVar[str] = "smooth"
    feature: ClassVar[str] = "smooth_quant"
    alpha: float = 0.5
    scale_clamp_min: float = 1e-3
    scaling_layers: Any = None
    model_decoder_layers: str = ""

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> SmoothOptions:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise InvalidValueError(
                f"alpha {self.alpha!r}: expected a number from 0 to 1; AutoSmoothQuantConfig searches for the best one"
            )
        if self.scale_clamp_min != SmoothQuantConfig.scale_clamp_min:
            raise UnsupportedOptionError(
                f"scale_clamp_min {self.scale_clamp_min!r}: scales are limited to a factor of 1024 between channels; "
                "leave it out"
            )
        _refuse_structure(self)
        return SmoothOptions(float(self.alpha))


@refuse_unknown_fields
@dataclass(frozen=True)
class AutoSmoothQuantConfig(AlgoConfig):
    """SmoothQuant with the alpha of the least estimated error for each group of layers that share their input. Of the
    fields of AMD's class, those that describe the network are accepted with their defaults only."""

    name: ClassVar[str] = "autosmoothquant"
    feature: ClassVar[str] = "smooth_quant"
    scaling_layers: Any = None
    model_decoder_layers: str = ""

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> SmoothOptions:
        _refuse_structure(self)
        return SmoothOptions(None)


def _refuse_structure(config: SmoothQuantConfig | AutoSmoothQuantConfig) -> None:
    for name in ("scaling_layers", "model_decoder_layers"):
        if getattr(config, name):
            raise UnsupportedOptionError(
                f"{name} of algorithm '{config.name}': the layers, and what computes their inputs, are found in the "
                "graph; leave it out, and list layers that should stay in float in Config's exclude"
            )


OwnConfig: TypeAlias = CLEConfig | BiasCorrectionConfig | SmoothQuantConfig | AutoSmoothQuantConfig
ALGORITHMS: Mapping[str, type[AlgoConfig]] = {
    each.name: each for each in (CLEConfig, BiasCorrectionConfig, SmoothQuantConfig, AutoSmoothQuantConfig)
}

_LANGUAGE = "it is made for language models; leave algo_config out for CLE and bias correction"
_REFUSED = {
    "awq": _LANGUAGE,
    "gptq": _LANGUAGE,
    "gptaq": _LANGUAGE,
    "autoround": _LANGUAGE,
    "qronos": _LANGUAGE,
    "rotation": _LANGUAGE,
    "quarot": _LANGUAGE,
    "svdquant": _LANGUAGE,
}


def _refusal(name: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(f"algorithm '{name}' is not carried out on torch models: {_REFUSED[name]}")


class _Refused(AlgoConfig):
    def __init_subclass__(cls, name: str) -> None:
        cls.name = name

    def __init__(self, *args: Any, **settings: Any) -> None:
        raise _refusal(self.name)


class AWQConfig(_Refused, name="awq"):
    """Known by name and refused when it is built; the error says what there is instead."""


class GPTQConfig(_Refused, name="gptq"):
    """Known by name and refused when it is built; the error says what there is instead."""


class GPTAQConfig(_Refused, name="gptaq"):
    """Known by name and refused when it is built; the error says what there is instead."""


class AutoRoundConfig(_Refused, name="autoround"):
    """Known by name and refused when it is built; the error says what there is instead."""


class QronosConfig(_Refused, name="qronos"):
    """Known by name and refused when it is built; the error says what there is instead."""


class RotationConfig(_Refused, name="rotation"):
    """Known by name and refused when it is built; the error says what there is instead."""


class SVDQuantConfig(_Refused, name="svdquant"):
    """Known by name and refused when it is built; the error says what there is instead."""


def algorithm_dict(algorithm: Any) -> dict[str, Any]:
    """An entry of `algo_config` as JSON can hold it."""
    if isinstance(algorithm, AlgoConfig):
        return algorithm.to_dict()
    return {"name": _feature_of(algorithm).folder, **asdict(algorithm)}


def _feature_of(options: Any) -> Feature:
    """The feature of features/order.py that these are the options of."""
    found = next((each for each in FEATURES if each.switch and type(options) is each.options), None)
    if found is None:
        raise UnsupportedTypeError(
            f"algo_config {options!r}: expected CLEConfig, BiasCorrectionConfig, SmoothQuantConfig or "
            "AutoSmoothQuantConfig"
        )
    return found


ChosenOptions: TypeAlias = tuple[CrossLayerOptions | None, TorchBiasCorrectionOptions | None, dict[str, Any]]


def chosen_options(algorithms: Sequence[Any]) -> ChosenOptions:
    """The options of equalization, of bias correction, and of the features of features/order.py that are listed."""
    if not isinstance(algorithms, Sequence):
        raise UnsupportedTypeError(f"algo_config {algorithms!r}: expected a list, such as [CLEConfig()]; [] is none")
    found: dict[str, Any] = {}
    for each in algorithms:
        is_own = isinstance(each, OwnConfig)
        feature = each.feature if is_own else _feature_of(each).folder
        if feature in found:
            raise UnsupportedOptionError(
                f"algorithm '{each.name if is_own else feature}' is listed twice: keep one of the two"
            )
        found[feature] = each.options() if is_own else each
    return found.pop(CLEConfig.feature, None), found.pop(BiasCorrectionConfig.feature, None), found
