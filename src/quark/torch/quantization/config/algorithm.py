"""The accuracy algorithms that a Config can list; those of AMD's that are not carried out are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias

from quark.errors import UnsupportedOptionError, UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.torch.equalize.options import CrossLayerOptions
from quark.torch.refine.options import BiasCorrectionOptions


@refuse_unknown_fields
@dataclass(frozen=True)
class AlgoConfig:
    """An algorithm with its settings."""

    name: ClassVar[str] = ""

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
        if name not in ALGORITHMS:
            raise unknown_name("algorithm", name, ALGORITHMS)
        known = [each.name for each in fields(ALGORITHMS[name])]
        for key in settings:
            if key not in known:
                raise unknown_name(f"setting of algorithm '{name}'", key, known)
        return ALGORITHMS[name](**settings)


@refuse_unknown_fields
@dataclass(frozen=True)
class CLEConfig(AlgoConfig):
    """Cross-layer equalization: `steps` sweeps over all pairs of layers; -1: until they settle."""

    name: ClassVar[str] = "cle"
    steps: int = CrossLayerOptions.steps

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> CrossLayerOptions:
        return CrossLayerOptions(self.steps)


@refuse_unknown_fields
@dataclass(frozen=True)
class BiasCorrectionConfig(AlgoConfig):
    """Biases corrected by the mean error of their layer's output, over at most so many `samples`."""

    name: ClassVar[str] = "bias_correction"
    samples: int = BiasCorrectionOptions.samples

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> BiasCorrectionOptions:
        return BiasCorrectionOptions(self.samples)


ALGORITHMS: Mapping[str, type[AlgoConfig]] = {each.name: each for each in (CLEConfig, BiasCorrectionConfig)}

_LANGUAGE = "it is made for language models; leave algo_config out for CLE and bias correction"
_ONNX = "in this version it is on the ONNX road; export to ONNX and use quark.onnx, or leave algo_config out"
_REFUSED = {
    "smooth": _ONNX,
    "autosmoothquant": _ONNX,
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
    def __init__(self, *args: Any, **settings: Any) -> None:
        raise _refusal(self.name)


class SmoothQuantConfig(_Refused):
    """Known by name and refused when it is built; the error says what there is instead."""

    name = "smooth"


class AutoSmoothQuantConfig(_Refused):
    """Known by name and refused when it is built; the error says what there is instead."""

    name = "autosmoothquant"


class AWQConfig(_Refused):
    """Known by name and refused when it is built; the error says what there is instead."""

    name = "awq"


class GPTQConfig(_Refused):
    """Known by name and refused when it is built; the error says what there is instead."""

    name = "gptq"


class GPTAQConfig(_Refused):
    """Known by name and refused when it is built; the error says what there is instead."""

    name = "gptaq"


class AutoRoundConfig(_Refused):
    """Known by name and refused when it is built; the error says what there is instead."""

    name = "autoround"


class QronosConfig(_Refused):
    """Known by name and refused when it is built; the error says what there is instead."""

    name = "qronos"


class RotationConfig(_Refused):
    """Known by name and refused when it is built; the error says what there is instead."""

    name = "rotation"


class SVDQuantConfig(_Refused):
    """Known by name and refused when it is built; the error says what there is instead."""

    name = "svdquant"


ChosenOptions: TypeAlias = tuple[CrossLayerOptions | None, BiasCorrectionOptions | None]


def chosen_options(algorithms: Sequence[AlgoConfig]) -> ChosenOptions:
    """What a list of algorithms comes to; of each kind there can be one."""
    equalize: CrossLayerOptions | None = None
    correct: BiasCorrectionOptions | None = None
    if not isinstance(algorithms, Sequence):
        raise UnsupportedTypeError(f"algo_config {algorithms!r}: expected a list, such as [CLEConfig()]; [] is none")
    for each in algorithms:
        if isinstance(each, CLEConfig) and equalize is None:
            equalize = each.options()
        elif isinstance(each, BiasCorrectionConfig) and correct is None:
            correct = each.options()
        elif isinstance(each, AlgoConfig):
            raise UnsupportedOptionError(f"algorithm '{each.name}' is listed twice: keep one of the two")
        else:
            raise UnsupportedTypeError(f"algo_config {each!r}: expected CLEConfig or BiasCorrectionConfig")
    return equalize, correct
