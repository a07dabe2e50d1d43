"""Rename operators of com.amd.quark to the earlier names that Vitis AI gave them, or back."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace

from onnx import ModelProto

from quark.onnx.convert.operators import VITIS_DOMAIN, VITIS_NAMES, convert_custom_ops, require
from quark.onnx.tools.command import Argument, Tool, convert_file
from quark.ops.onnx_nodes import all_nodes
from quark.ops.portable_functions import define_portable_functions
from quark.ops.schema import DOMAIN

__all__ = ["NAME_MAPPING", "NEW_DOMAIN", "OLD_DOMAIN", "TOOL", "convert_custom_ops", "run_main"]

NEW_DOMAIN, OLD_DOMAIN = DOMAIN, VITIS_DOMAIN
NAME_MAPPING = dict(VITIS_NAMES)


def _converted(model: ModelProto, *, reverse_conversion: bool) -> ModelProto:
    """The model with other names, and with functions under these names, so that any runtime runs it."""
    names = {old: new for new, old in NAME_MAPPING.items()} if reverse_conversion else NAME_MAPPING
    before, after = (OLD_DOMAIN, NEW_DOMAIN) if reverse_conversion else (NEW_DOMAIN, OLD_DOMAIN)
    is_present = any(node.op_type in names and node.domain == before for node in all_nodes(model.graph.node))
    require(is_present, model, f"operators of {before}")
    if not reverse_conversion:
        define_portable_functions(model)
    result = convert_custom_ops(model, after, names)
    if reverse_conversion:
        define_portable_functions(result)
    return result


def _convert(args: Namespace) -> None:
    convert_file(
        args.input_model,
        args.output_model,
        lambda model: _converted(model, reverse_conversion=args.reverse_conversion),
        has_external_data=args.external_data,
    )


def _truth(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise ArgumentTypeError(f"'{text}': expected True or False")
    return values[text.lower()]


def _switch(name: str, about: str) -> Argument:
    """A flag that stands alone, or with True or False behind it, as AMD's documents have it."""
    return Argument(name, about, type=_truth, nargs="?", const=True, default=False, metavar="True|False")


TOOL = Tool(
    "Rename operators of com.amd.quark to the names they had in Vitis AI, or back.",
    Argument("--input_model", "the model"),
    Argument("--output_model", "the model to write"),
    _switch("--external_data", "Write the weights to a file beside the model."),
    _switch("--reverse_conversion", "Rename the operators of Vitis AI to those of com.amd.quark."),
    work=_convert,
)
run_main = TOOL.run

if __name__ == "__main__":
    run_main()
