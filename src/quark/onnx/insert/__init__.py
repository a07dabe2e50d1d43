"""Carry out: a plan becomes nodes and integer weights in the graph. Nothing here decides."""

from quark.onnx.insert.insert import insert
from quark.onnx.insert.options import InsertOptions, NBitsOptions, NodeStyle

__all__ = ["InsertOptions", "NBitsOptions", "NodeStyle", "insert"]
