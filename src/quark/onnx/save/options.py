"""The options of saving."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveOptions:
    has_portable_functions: bool = True  # the operators of com.amd.quark as functions, so that any runtime runs them
    has_external_data: bool = False  # weights in a file beside the model; larger than 2 GB they always are
