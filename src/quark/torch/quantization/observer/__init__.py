"""Observers that a spec can name: each applies a method of `quark.ranges` to a tensor, its channels or blocks."""

from quark.torch.quantization.observer.observer import *  # noqa: F403
from quark.torch.quantization.observer.observer import __all__ as __all__
