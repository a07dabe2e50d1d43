"""Silence for exporters: torch's prints, warns and logs about itself, and nothing of it is for the user of quark."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

_TALKATIVE = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, those loggers say errors only, warnings are dropped, and so is what goes to the standard output."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
