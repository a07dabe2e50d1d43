"""Measures, their text form, and how networks are judged by them.

cosine   box_f1?threshold=0.3&iou=0.5   argmax?axis=1&output=logits     built-in, with parameters
evaluate.py:accuracy   package.module:accuracy                          a function; higher is better
-evaluate.py:word_errors                                                a function; lower is better
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from quark.compare.outputs import samples_of_batch
from quark.errors import InvalidValueError, ModelError, QuarkError, UnsupportedTypeError, unknown_name
from quark.measures.meters import BUILT_IN, Meter, Parameter, Value
from quark.text import json_value

Array = NDArray[Any]
Outputs = Mapping[str, Array]

FLOAT, QUANTIZED = "the float network", "the quantized network"
_OUTPUT = {"output": Parameter(str)}


class Session(Protocol):
    """The part of `onnxruntime.InferenceSession` that measures use."""

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any: ...

    def get_inputs(self) -> Any: ...

    def get_outputs(self) -> Any: ...


@dataclass(frozen=True)
class MeasureResult:
    """The values of the float and of the quantized network.

    >>> result = MeasureResult("accuracy", 0.8, 0.76, is_higher_better=True)
    >>> round(result.drop, 3), str(result)
    (0.05, 'accuracy 0.8 -> 0.76, 5.00 % lost')
    """

    name: str
    float_value: float
    value: float
    is_higher_better: bool = True

    @property
    def drop(self) -> float:
        """How much was lost; positive is worse.

        If higher is better, this is (float - quantized) / |float|; the difference if float's value is 0. For error
        rates, it is the difference. For decibels relative to float, whose own value is infinite, it is the root mean
        square error as a share of the peak: 40 dB are a drop of 1 %.
        """
        if not self.is_higher_better:
            return self.value - self.float_value
        if self.float_value == math.inf:
            return 0.0 if self.value == math.inf else float(10.0 ** min(-self.value / 20.0, 300.0))
        return (self.float_value - self.value) / (abs(self.float_value) or 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the values and the drop as JSON; infinities are text."""
        content = {"name": self.name, "float_value": self.float_value, "value": self.value}
        content |= {"is_higher_better": self.is_higher_better, "drop": self.drop}
        return {name: json_value(value) for name, value in content.items()}

    def __str__(self) -> str:
        change = f"{100 * abs(self.drop):.2f} {'%' if self.is_higher_better else 'points'}"
        word = "lost" if self.is_higher_better else "more"
        if self.drop < 0:
            word = "gained" if self.is_higher_better else "less"
        return f"{self.name} {self.float_value:.4g} -> {self.value:.4g}, {change} {word}"


class Measure(ABC):
    """A measure of quality. `is_higher_better` is False for error rates.

    >>> Measure.of("cer").is_higher_better
    False
    """

    name: str
    is_higher_better: bool

    @staticmethod
    def of(spec: str | Measure | Callable[[Any], Any], *, lower_is_better: bool | None = None) -> Measure:
        """Make a measure of its name, of FILE.py:FUNCTION, of package.module:FUNCTION, or of a function.

        A function is called with an ONNX Runtime session and returns a number. Higher is better unless
        `lower_is_better`, a `-` in front of the text, or an attribute `lower_is_better` of the function says otherwise.
        Files are looked for in the current folder.

        >>> Measure.of("box_f1?threshold=0.3").name
        'box_f1?threshold=0.3'
        """
        if isinstance(spec, Measure):
            return spec
        if isinstance(spec, str):
            text = spec.strip()
            is_lower_better = text.startswith("-")
            text = text.removeprefix("-")
            if ":" not in text.partition("?")[0]:
                if is_lower_better or lower_is_better is not None:
                    raise InvalidValueError(
                        f"measure '{spec}': it is known whether high values of a built-in measure are better; only a "
                        "function can be marked as lower is better"
                    )
                return _built_in(text)
            function, name, fingerprint = load_function(text)
        elif callable(spec):
            is_lower_better, function, fingerprint = False, spec, ""
            name = str(getattr(spec, "__name__", None) or type(spec).__name__)
        else:
            raise UnsupportedTypeError(
                f"measure {spec!r}: expected a name such as 'cosine', 'FILE.py:FUNCTION', or a function"
            )
        if lower_is_better is None:
            lower_is_better = is_lower_better or bool(getattr(function, "lower_is_better", False))
        return FunctionMeasure(name, not lower_is_better, function, fingerprint or _fingerprint_of(function))

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A text that changes with what is measured, as far as known: the data of a function is not."""

    @property
    def least_samples(self) -> int:
        """The smallest number of samples that the measure can be computed from; 0 for functions."""
        return 0

    @abstractmethod
    def judge(self, reference: Session, session: Session, samples: Iterable[Outputs]) -> MeasureResult:
        """Measure both networks: on the samples, or for a function on whatever data it uses."""

    def result(self, float_value: float, value: float) -> MeasureResult:
        return MeasureResult(self.name, float_value, value, self.is_higher_better)


@dataclass(frozen=True)
class FunctionMeasure(Measure):
    """A function of the user's that takes a session and returns a number."""

    name: str
    is_higher_better: bool
    function: Callable[[Any], Any]
    _fingerprint: str = field(default="", repr=False)

    @property
    def fingerprint(self) -> str:
        return f"{self.name} {self.is_higher_better} {self._fingerprint}"

    def value(self, session: Session, network: str = QUANTIZED) -> float:
        """Call the function; `network` names the network in errors."""
        try:
            value = self.function(session)
        except Exception as error:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise InvalidValueError(f"measure '{self.name}' failed on {network}: {what}") from error
        if not isinstance(value, Real) and math.prod(getattr(value, "shape", (0,))) == 1:
            value = value.item()  # an array of one number, of numpy or torch
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
            raise UnsupportedTypeError(
                f"measure '{self.name}' returned {value!r} of type {type(value).__name__} for {network}: expected one "
                "number"
            )
        if not math.isfinite(value):
            raise InvalidValueError(
                f"measure '{self.name}' returned {float(value)} for {network}: expected a finite number"
            )
        return float(value)

    def judge(self, reference: Session, session: Session, samples: Iterable[Outputs] = ()) -> MeasureResult:
        return self.result(self.value(reference, FLOAT), self.value(session))


@dataclass(frozen=True)
class OutputMeasure(Measure):
    """A built-in measure: compares the outputs of two networks on the same samples."""

    name: str
    is_higher_better: bool
    kind: str
    parameters: tuple[tuple[str, Value], ...] = ()
    output: str | None = None

    @property
    def fingerprint(self) -> str:
        return f"{self.kind} {self.parameters} {self.output}"

    @property
    def least_samples(self) -> int:
        return self.meter().meter.least_samples

    def meter(self) -> OutputMeter:
        """Start a comparison, to which samples are added one by one."""
        return OutputMeter(self, BUILT_IN[self.kind].make(**dict(self.parameters)))

    def compare(self, expected: Iterable[Outputs], actual: Iterable[Outputs]) -> float:
        """Return the value of the outputs `actual` against those of the float network: dicts from output name to array,
        one for each sample."""
        meter = self.meter()
        for first, second in zip(expected, actual, strict=True):
            meter.add(first, second)
        return meter.value()

    def judge(self, reference: Session, session: Session, samples: Iterable[Outputs]) -> MeasureResult:
        return Judge(self, reference, list(samples)).judge(session)


class OutputMeter:
    """One comparison by a built-in measure. `meter` gets the output that the measure is about."""

    def __init__(self, measure: OutputMeasure, meter: Meter) -> None:
        self.measure, self.meter = measure, meter
        self.count = 0

    def add(self, expected: Outputs, actual: Outputs) -> None:
        """Add one sample."""
        name = output_of(self.measure, expected)
        if name not in actual:
            raise unknown_name("output of the quantized network", name, actual)
        first, second = np.asarray(expected[name]), np.asarray(actual[name])
        if first.dtype.kind not in "biuf":
            raise ModelError(f"measure '{self.measure.name}': output '{name}' of type {first.dtype} has no numbers")
        if self.meter.has_equal_shapes and first.shape != second.shape:
            raise ModelError(
                f"measure '{self.measure.name}': output '{name}' has shape {list(first.shape)} in the float network "
                f"and {list(second.shape)} in the quantized one: expected the same"
            )
        with _naming(f"measure '{self.measure.name}', output '{name}'"):
            self.meter.add(first, second)
        self.count += 1

    def value(self) -> float:
        least = self.meter.least_samples
        if self.count < least:
            raise InvalidValueError(_too_few(self.measure, self.count))
        with _naming(f"measure '{self.measure.name}'"):
            return self.meter.result()


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put the name of the measure in front of the errors of a meter."""
    try:
        yield
    except QuarkError as error:
        raise type(error)(f"{where}: {error}") from error


class Judge:
    """Measures the float network once, and then any number of quantized networks against it.

    `samples` are dicts of the networks' inputs; functions do not use them. `expected` are the float network's outputs
    for them, if they are known: then built-in measures need no `reference`. Both are read again for each network.
    Problems of the float network are reported here, before any quantized network exists.
    """

    def __init__(
        self,
        measure: Measure,
        reference: Session | None,
        samples: Iterable[Outputs] = (),
        expected: Iterable[Outputs] | None = None,
    ) -> None:
        self.measure = measure
        self._samples = list(samples) if isinstance(samples, Iterator) else samples
        self._expected: Iterable[Outputs] = ()
        if isinstance(measure, OutputMeasure):
            if expected is None:
                assert reference is not None
                expected = list(self._outputs(reference, FLOAT))
            self._expected = list(expected) if isinstance(expected, Iterator) else expected
            self.float_value = self._compared(self._expected)
        else:
            assert isinstance(measure, FunctionMeasure)
            assert reference is not None
            self.float_value = measure.value(reference, FLOAT)

    def judge(self, session: Session) -> MeasureResult:
        """Measure a quantized network."""
        if isinstance(self.measure, FunctionMeasure):
            return self.measure.result(self.float_value, self.measure.value(session))
        return self.judge_outputs(self._outputs(session, QUANTIZED))

    def judge_outputs(self, actual: Iterable[Outputs]) -> MeasureResult:
        """Measure a quantized network by its outputs for the samples; only for built-in measures."""
        return self.measure.result(self.float_value, self._compared(actual))

    def _compared(self, actual: Iterable[Outputs]) -> float:
        assert isinstance(self.measure, OutputMeasure)
        meter = self.measure.meter()
        for sample, expected, quantized in zip(self._samples, self._expected, actual, strict=True):
            # sizes of the inputs' first axes
            sizes = {len(array) if np.ndim(array) else 1 for array in sample.values()}
            count = sizes.pop() if len(sizes) == 1 else 1
            batches = samples_of_batch(expected, count), samples_of_batch(quantized, count)
            for wanted, computed in zip(*batches, strict=True):
                meter.add(wanted, computed)
        return meter.value()

    def _outputs(self, session: Session, network: str) -> Iterator[Outputs]:
        names = [output.name for output in session.get_outputs()]
        assert isinstance(self.measure, OutputMeasure)
        wanted = [output_of(self.measure, dict.fromkeys(names))]
        for sample in self._samples:
            try:
                results = session.run(wanted, dict(sample))
            except Exception as error:  # ONNX Runtime's exceptions have no other common base
                text = " ".join(str(error).split())
                raise ModelError(f"measure '{self.measure.name}': {network} cannot be run: {text}") from error
            yield dict(zip(wanted, (np.asarray(result) for result in results), strict=True))


def output_of(measure: OutputMeasure, outputs: Mapping[str, Any]) -> str:
    """Return the output that a measure applies to: the one it names, or the first."""
    if not outputs:
        raise ModelError(f"measure '{measure.name}': the network has no outputs")
    if measure.output is not None and measure.output not in outputs:
        raise unknown_name(f"output for the measure '{measure.name}'", measure.output, outputs)
    return measure.output or next(iter(outputs))


def measure_names() -> dict[str, str]:
    """Return the built-in measures by name, with one line each.

    >>> measure_names()["ssim"]
    'images: structural similarity'
    """
    return {name: measure.line for name, measure in BUILT_IN.items()}


def check_count(measure: Measure, count: int) -> None:
    """Raise an error if a built-in measure cannot be computed from that few samples."""
    if count < measure.least_samples:
        raise InvalidValueError(_too_few(measure, count))


def _too_few(measure: Measure, count: int) -> str:
    return (
        f"measure '{measure.name}' needs at least {measure.least_samples} samples, and there are {count}: give more "
        "data (of calibration data every eighth sample is held out for measuring)"
    )


def _built_in(text: str) -> OutputMeasure:
    kind, _, query = text.partition("?")
    if kind.endswith(".py"):
        raise InvalidValueError(f"measure '{text}': expected FILE.py:FUNCTION, such as {kind}:accuracy")
    if kind not in BUILT_IN:
        raise unknown_name("measure", kind, BUILT_IN)
    known: dict[str, Parameter] = {**BUILT_IN[kind].parameters, **_OUTPUT}
    given: dict[str, Value] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidValueError(f"measure '{text}': expected NAME=VALUE behind the ?, got '{part}'")
        if name not in known:
            raise unknown_name(f"parameter of the measure '{kind}' called", name, known)
        if name in given:
            raise InvalidValueError(f"measure '{text}': {name} is given twice")
        given[name] = known[name].parse(unquote(value), f"measure '{text}', {name}")
    output = given.pop("output", None)
    chosen = tuple(sorted(given.items()))
    measure = OutputMeasure(
        text, BUILT_IN[kind].is_higher_better, kind, chosen, None if output is None else str(output)
    )
    measure.meter()  # checks parameters that depend on each other
    return measure


def load_function(text: str, what: str = "measure") -> tuple[Callable[..., Any], str, str]:
    """Return the function that FILE.py:FUNCTION or package.module:FUNCTION names, its name without folders, and a hash
    of its file. `what` is the function's purpose, for messages."""
    place, _, path = text.rpartition(":")
    if not place or not path:
        raise InvalidValueError(f"{what} '{text}': expected FILE.py:FUNCTION or package.module:FUNCTION")
    if place.endswith(".py"):
        file = Path(place).expanduser()
        if not file.is_file():
            raise InvalidValueError(f"{what} '{text}': there is no file '{file}'")
        module, name = _module_of_file(file.resolve(), text, what), f"{file.name}:{path}"
        fingerprint = hashlib.sha256(file.read_bytes()).hexdigest()
    else:
        module, name, fingerprint = _module_by_name(place, text, what), text, ""
    target: Any = module
    for part in path.split("."):
        if not hasattr(target, part):
            known = [known for known, value in vars(target).items() if callable(value) and not known.startswith("_")]
            raise unknown_name(f"function in '{place}' called", path, known)
        target = getattr(target, part)
    if not callable(target):
        raise UnsupportedTypeError(f"{what} '{text}': '{path}' is of type {type(target).__name__}: expected a function")
    return target, name, fingerprint


def _module_of_file(file: Path, text: str, what: str) -> Any:
    """Load a file under a private name, so that it shadows no module. It can import the files beside it."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()
    name = f"_quark_{what}_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    _add_to_path(file.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InvalidValueError(f"{what} '{text}': loading '{file}' failed: {type(error).__name__}: {error}") from error
    return module


def _module_by_name(name: str, text: str, what: str) -> Any:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidValueError(f"{what} '{text}': expected FILE.py:FUNCTION or package.module:FUNCTION")
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise InvalidValueError(
            f"{what} '{text}': importing '{name}' failed: {type(error).__name__}: {error}"
        ) from error


def _add_to_path(folder: Path) -> None:
    """Add a folder at the end, so that it shadows nothing that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _fingerprint_of(function: Any) -> str:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # built in, or typed into an interpreter
        source = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    return hashlib.sha256(source.encode()).hexdigest()
