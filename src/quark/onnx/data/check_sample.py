"""Whatever a person has, as a dict of arrays that the model takes; or an error that says what is wrong with it.

Strict about what changes numbers: a numpy or torch array of another type is refused, since a silent cast hides a wrong
preprocessing. Lenient about form: a lone array for a lone input, (inputs, labels) of a loader, plain Python numbers, a
missing batch axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.data.input_info import InputInfo, list_inputs

Sample: TypeAlias = dict[str, npt.NDArray[Any]]

_MOST_LEVELS = 64  # of lists in lists, as many as an array has axes


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
    for _ in range(_MOST_LEVELS):  # a list may hold itself
        if not isinstance(item, (tuple, list)) or not item:
            break
        item = item[0]
    return isinstance(item, (int, float, bool))


def as_numpy(value: Any, what: str) -> npt.NDArray[Any]:
    """Return a numpy or torch array, or a number of either, as a numpy array of the same type. `what` names it."""
    try:
        if hasattr(value, "detach"):  # a torch tensor, whether or not torch can be imported here
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":  # numpy has none of its own, and torch does not convert it
                return np.asarray(value.float().numpy()).astype(ml_dtypes.bfloat16)
            value = value.numpy()
        return np.asarray(value)
    except Exception as error:  # torch and objects with an __array__ of their own raise what they like
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedTypeError(
            f"{what}: {type(value).__name__} cannot be made an array of numpy: {reason}"
        ) from error


def _to_array(value: Any, info: InputInfo, where: str) -> npt.NDArray[Any]:
    what = f"{where}, input '{info.name}'"
    if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "detach") or hasattr(value, "__array__"):
        return as_numpy(value, what)
    try:
        return np.asarray(value, dtype=info.dtype)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedTypeError(
            f"{what}: expected an array of {info.dtype.name}, got {type(value).__name__}"
        ) from error


def _check(array: npt.NDArray[Any], info: InputInfo, where: str) -> npt.NDArray[Any]:
    what = f"{where}, input '{info.name}'"
    if array.dtype != info.dtype and (array.dtype.kind in "OSUMmc" or array.dtype.type is np.void):
        kind = "structured" if array.dtype.names else array.dtype.name  # its numbers cannot just be cast
        raise UnsupportedTypeError(f"{what}: {kind} values, the model takes {info.dtype.name}; expected {info}")
    if array.dtype != info.dtype:
        raise UnsupportedTypeError(
            f"{what}: {array.dtype}, the model takes {info.dtype.name}; preprocess as for inference, or convert with "
            f".astype('{info.dtype.name}') where the values are right already"
        )
    if not array.size:
        raise InvalidValueError(
            f"{what}: shape {array.shape} holds no value, and calibration learns nothing from it; leave the sample "
            f"out, or give it a size. The model takes {info}"
        )
    array = _check_shape(array, info, what)
    if array.dtype.kind in "fc" or array.dtype == ml_dtypes.bfloat16:
        bad = int(array.size - np.count_nonzero(np.isfinite(array)))
        if bad:
            raise InvalidValueError(
                f"{what}: {bad} of {array.size} values are NaN or Inf; calibrating on them is no use"
            )
    return np.ascontiguousarray(array) if array.ndim else array


def _check_shape(array: npt.NDArray[Any], info: InputInfo, what: str) -> npt.NDArray[Any]:
    if info.shape is None:
        return array
    if array.ndim == len(info.shape) - 1 and info.batch in (None, 1):
        array = array[None]
    expected = info.shape
    fits = array.ndim == len(expected) and all(
        not isinstance(dim, int) or size == dim for size, dim in zip(array.shape[1:], expected[1:], strict=False)
    )
    if fits and array.ndim and info.batch is not None:
        fits = info.batch > 0 and array.shape[0] % info.batch == 0  # several batches are fed one after the other
    if not fits:
        raise InvalidValueError(f"{what}: shape {array.shape}, the model takes {info}")
    return array
