"""The version of the installed torch, for scripts that ask."""

from __future__ import annotations

from quark.text import version_numbers


def is_torch_higher_or_equal(min_version: str) -> bool:
    """True if torch is of that version or newer."""
    return version_numbers(_torch_version()) >= version_numbers(min_version)


def is_torch_lower_or_equal(max_version: str) -> bool:
    """True if torch is of that version or older."""
    return version_numbers(_torch_version()) <= version_numbers(max_version)


def torch_supports_stable_abi() -> bool:
    """True if torch has an interface for operators that are compiled once for several versions."""
    return is_torch_higher_or_equal("2.10")


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
