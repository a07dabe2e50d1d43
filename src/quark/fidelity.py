"""The earlier name of `quark.compare`, for scripts that import from here."""

from quark.compare import *  # noqa: F403
from quark.compare import __all__ as __all__
