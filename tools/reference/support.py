"""docs/support_matrix.md: operators by presets, formats by runtimes, and what each road knows of an operator.

Every cell is what the code decides: see `operator_support` and `format_support` for how it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quark.decide.operators import OPERATORS
from quark.npu.rules import RULES
from quark.onnx.insert.qoperator import FORMS
from quark.onnx.simulate import SUBSTITUTION_OF_OPTION, SUBSTITUTIONS
from quark.torch.view import ATEN_NAMES
from tools.reference.format_support import OPSETS, FormatRow, format_rows
from tools.reference.markdown import code, generated, table
from tools.reference.operator_support import Column, columns

INTRODUCTION = """
These tables, which are generated from the code, show what is quantized, how it is written to the file, and where it
runs. The report of each run says what was done with each operator of your model, and why.

1. [Operators](#operators): which presets quantize them
2. [Runtimes](#runtimes): operators on codes, the NPU's rules, PyTorch
3. [Formats](#formats): how they are written, and what runs them
"""
OPERATORS_TEXT = """
`yes`: quantized. `moves`: only moves values, and has their scale if a neighbour is quantized. `asked`: in float unless
`extra_op_types_to_quantize` names it. Empty: in float. Operators that are not listed stay in float. For Conv,
ConvTranspose, Gemm, MatMul, LSTM, GRU and RNN, the table assumes constant weights; of the last three, only these are
integers ([recurrent networks](quantizing_onnx.md#recurrent-networks-and-embeddings)). A Gather from a constant table is
an embedding there.

`op_types_to_quantize`, `nodes_to_exclude` and similar fields change the selection:
[what is quantized](quantizing_onnx.md#what-is-quantized).
"""
RUNTIMES_TEXT = """
- **On codes**: there is an operator on 8-bit codes, which `QuantFormat.QOperator` writes into the file if operands and
  results are quantized. In QDQ files, ONNX Runtime decides what it fuses into such kernels.
- **NPU**: the [rules on positions](npu.md#the-rules-on-positions) for the operator, and what replaces it. `quark lint`
  accepts every operator of this table, except LSTM, GRU, RNN, and Min and Max with a bound per channel.
- **PyTorch**: the aten operators that `quark.torch` treats as this one.
"""
FORMATS_TEXT = """
The table shows how an activation of each format is quantized in the file. Standard operators and those of
`com.microsoft` are ONNX Runtime's own. Those of `com.amd.quark` run as compiled code if
[our library](operators.md#with-the-library) is registered; without it, the functions in the file compute the same, but
slower ([operators](operators.md#without-the-library)). Presets with finetuning or mixed precision use the same formats.
"""


def support_matrix(command: str) -> str:
    """The text of docs/support_matrix.md."""
    parts = [
        generated(command, "Support matrix") + INTRODUCTION,
        "## Operators\n" + OPERATORS_TEXT,
        *_operators(columns()),
        "## Runtimes\n" + RUNTIMES_TEXT,
        table(("operator", "on codes", "NPU", "PyTorch"), map(_runtime_row, OPERATORS)),
        "## Formats\n" + FORMATS_TEXT,
        _formats(list(format_rows())),
    ]
    return "\n".join(parts)


def _operators(groups: tuple[Column, ...]) -> Iterable[str]:
    letters = [chr(ord("A") + index) for index in range(len(groups))]
    presets = [" ".join(code(name) for name in column.presets) for column in groups]
    yield table(("column", "presets"), zip(letters, presets, strict=True))
    yield table(
        ("operator", *letters), [(op_type, *(column.cells[op_type] for column in groups)) for op_type in OPERATORS]
    )


def _runtime_row(op_type: str) -> tuple[str, ...]:
    rules = [code(rule.name) for rule in RULES if op_type in rule.op_types]
    rules += [code(option) for option, types in _substituted().items() if op_type in types]
    aten = [code(name.removesuffix(".default")) for name in ATEN_NAMES.get(op_type, "").split()]
    return op_type, "yes" if op_type in FORMS else "", " ".join(rules), " ".join(aten)


def _substituted() -> Mapping[str, tuple[str, ...]]:
    """Option of a substitution to the operators that it changes."""
    by_name = {substitution.name: substitution.op_types for substitution in SUBSTITUTIONS}
    return {option: by_name[name] for option, name in SUBSTITUTION_OF_OPTION.items()}


def _formats(rows: list[FormatRow]) -> str:
    headings = ("format", "bits", *(f"nodes, opset {opset}" for opset in OPSETS), "without our library", "presets")
    return table((*headings, "`quark.torch`"), map(_format_row, rows))


def _format_row(row: FormatRow) -> tuple[str, ...]:
    without = "functions in the file" if row.is_ours else "the same"
    nodes = tuple(" ".join(code(part) for part in nodes.split(", ")) for nodes in row.nodes)
    presets = " ".join(code(name) for name in row.presets)
    return (code(row.name), f"{row.bits_per_element:g}", *nodes, without, presets, row.torch_name)
