"""The operator library, at the import path that existing scripts use."""

from quark.ops.library import get_library_path

__all__ = ["get_library_path"]
