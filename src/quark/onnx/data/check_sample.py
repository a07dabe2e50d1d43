"""Whatever a person has, as a dict of arrays that the model takes; or an error that says what is wrong with it.

Strict about what changes numbers: a numpy or torch array of another type is refused, since a silent cast hides a wrong
preprocessing. Lenient about form: a lone array for a lone input, (inputs, labels) of a loader, plain Python numbers, a
missing batch axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.data.input_info import InputInfo, list_inputs

Sample: TypeAlias = dict[str, npt.NDArray[Any]]


def as_sample(item: Any, inputs: Sequence[InputInfo], index: int) -> Sample:
    """Item number `index` of the data, checked."""
    where = f"calibration sample {index}"
    named = _name_arrays(item, inputs, where)
    unknown = [name for name in named if name not in {each.name for each in inputs}]
    missing = [each.name for each in inputs if each.name not in named]
    if unknown or missing:
        told = [f"no input is called {', '.join(map(repr, unknown))}"] if unknown else []
        told += [f"nothing for {', '.join(map(repr, missing))}"] if missing else []
        raise InvalidValueError(f"{where}: {'; '.join(told)}. The model's inputs: {list_inputs(inputs)}")
    sample = {each.name: _check(_to_array(named[each.name], each, where), each, where) for each in inputs}
    return sample


def _name_arrays(item: Any, inputs: Sequence[InputInfo], where: str) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    if isinstance(item, (tuple, list)) and not _is_numbers(item):
        if item and isinstance(item[0], Mapping):
            return item[0]
        if len(item) < len(inputs):
            raise InvalidValueError(
                f"{where}: {len(item)} arrays for {len(inputs)} inputs; expected {list_inputs(inputs)}"
            )
        return {each.name: value for each, value in zip(inputs, item, strict=False)}  # labels may follow
    if len(inputs) == 1:
        return {inputs[0].name: item}
    raise UnsupportedTypeError(
        f"{where}: a lone {type(item).__name__} for a model with {len(inputs)} inputs; give a dict with "
        f"{list_inputs(inputs)}"
    )


def _is_numbers(item: Any) -> bool:
    while isinstance(item, (tuple, list)) and item:
        item = item[0]
    return isinstance(item, (int, float, bool))


def _to_array(value: Any, info: InputInfo, where: str) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # a torch tensor, whether or not torch can be imported here
        return np.asarray(value.detach().cpu().numpy())
    if isinstance(value, np.generic) or hasattr(value, "__array__"):
        return np.asarray(value)
    try:
        return np.asarray(value, dtype=info.dtype)
    except (TypeError, ValueError) as error:
        raise UnsupportedTypeError(
            f"{where}, input '{info.name}': expected an array of {info.dtype.name}, got {type(value).__name__}"
        ) from error


def _check(array: npt.NDArray[Any], info: InputInfo, where: str) -> npt.NDArray[Any]:
    what = f"{where}, input '{info.name}'"
    if array.dtype != info.dtype:
        raise UnsupportedTypeError(
            f"{what}: {array.dtype}, the model takes {info.dtype.name}; preprocess as for inference, or convert with "
            f".astype('{info.dtype.name}') where the values are right already"
        )
    array = _check_shape(array, info, what)
    if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
        bad = int(array.size - np.count_nonzero(np.isfinite(array)))
        raise InvalidValueError(f"{what}: {bad} of {array.size} values are NaN or Inf; calibrating on them is no use")
    return np.ascontiguousarray(array) if array.ndim else array


def _check_shape(array: npt.NDArray[Any], info: InputInfo, what: str) -> npt.NDArray[Any]:
    if info.shape is None:
        return array
    if array.ndim == len(info.shape) - 1 and info.batch in (None, 1):
        array = array[None]
    expected = info.shape
    if not array.size:
        raise InvalidValueError(
            f"{what}: shape {array.shape} holds no value, and calibration learns nothing from it; leave the sample "
            f"out, or give it a size. The model takes {info}"
        )
    fits = array.ndim == len(expected) and all(
        not isinstance(dim, int) or size == dim for size, dim in zip(array.shape[1:], expected[1:], strict=False)
    )
    if fits and array.ndim and info.batch is not None:
        fits = info.batch > 0 and array.shape[0] % info.batch == 0  # several batches are fed one after the other
    if not fits:
        raise InvalidValueError(f"{what}: shape {array.shape}, the model takes {info}")
    return array
