"""How long the steps of a script take, for scripts that measure themselves with AMD Quark's profiler.

>>> profiler = GlobalProfiler()
>>> with profiler.scope(ProfileStep.MODEL_LOADING):
...     pass
>>> [step for step, seconds in profiler.steps]
['Model Loading']
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from quark.errors import InvalidValueError
from quark.files.output import complete
from quark.text import get_logger

_LOG = get_logger(__name__)


class ProfileStep:
    """Names of steps."""

    START = "Start"
    END = "End"
    USER_DEFINED = "User-Defined"
    MODEL_LOADED = "Model Loaded"
    FILE_TO_FILE_QUANTIZATION = "File-to-File Quantization"
    MODEL_LOADING = "Model Loading"
    DATASET_LOADING = "Dataset Loading"
    MODEL_QUANTIZATION = "Model Quantization"
    MODEL_EVALUATION = "Model Evaluation"
    ADVANCED_ALGORITHMS = "Advanced Algorithms"
    CALIBRATION_WEIGHTS = "Calibration (Weights)"
    CALIBRATION_FORWARD = "Calibration (Forward)"
    FREEZE_MODEL = "Freeze Model"
    MODEL_PREPARATION = "Model Preparation"
    EXPORT_HF_SAFETENSORS = "Export HF Safetensors"
    EXPORT_ONNX = "Export ONNX"
    EXPORT_GGUF = "Export GGUF"


class GlobalProfiler:
    """One for the whole process: every call returns it. With an `output_path`, what was measured is written there as
    YAML after each step; memory and disk are not measured."""

    _only: ClassVar[GlobalProfiler | None] = None
    steps: list[tuple[str, float]]
    output_path: Path | None

    def __new__(cls, output_path: str | os.PathLike[str] | None = None) -> GlobalProfiler:
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only.steps, cls._only.output_path = [], None
        if output_path is not None:
            cls._only.output_path = Path(output_path)
        return cls._only

    @contextmanager
    def scope(self, step: str, user_msg: str | None = None) -> Iterator[None]:
        """Measure what runs inside. A step that is USER_DEFINED is called by its `user_msg`."""
        name = user_msg if step == ProfileStep.USER_DEFINED else step
        if not name:
            raise InvalidValueError("user_msg: expected a name for a step that is USER_DEFINED")
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.steps.append((name, seconds))
            _LOG.info("%s: %.1f s", name, seconds)
            if self.output_path is not None:
                lines = [f"- step: {step!r}\n  seconds: {duration:.3f}" for step, duration in self.steps]
                self.output_path.parent.mkdir(parents=True, exist_ok=True)
                with complete(self.output_path) as temporary:
                    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def profile_scope(step: str, user_msg: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`GlobalProfiler().scope` as a decorator."""

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            with GlobalProfiler().scope(step, user_msg):
                return function(*args, **options)

        return wrapper

    return decorator
