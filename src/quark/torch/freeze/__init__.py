"""Freeze: what was trained becomes what is shipped."""

from quark.torch.freeze.freeze import freeze

__all__ = ["freeze"]
