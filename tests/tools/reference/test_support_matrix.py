"""The support matrix says what quantizing does."""

import numpy as np
import pytest

import quark.demo
from quark.decide.operators import OPERATORS
from quark.onnx import get_default_config, quantize
from quark.onnx.quantization.presets import PRESETS
from tools.reference.format_support import OPSETS, format_rows
from tools.reference.operator_support import columns
from tools.reference.support import support_matrix

IMAGES = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)


@pytest.fixture(scope="module")
def cells():
    """Preset to operator to cell."""
    return {name: column.cells for column in columns() for name in column.presets}


@pytest.mark.parametrize("preset", ["XINT8", "INT8_CNN_DEFAULT", "MXINT8", "UINT8_DYNAMIC_QUANT"])
def test_cells_are_what_becomes_of_a_network(cells, preset):
    config = get_default_config(preset)
    config.include_cle = False
    config.extra_options["VerdictMemoryLimit"] = 0
    report = quantize(quark.demo.network_path(), IMAGES, config).report
    quantized = {report.op_types[name] for name in report.quantized_nodes}
    skipped = {node.op_type for node in report.plan.skipped}
    assert quantized
    assert all(cells[preset][op_type] in ("yes", "moves") for op_type in quantized)
    assert all(cells[preset][op_type] not in ("yes", "moves") for op_type in skipped)


def test_asked_means_that_asking_for_it_helps(cells):
    assert cells["INT8_CNN_DEFAULT"]["Tanh"] == "asked"
    assert cells["MXINT8"]["Tanh"] == ""


def test_every_preset_without_training_has_a_column(cells):
    plain = {name for name, preset in PRESETS.items() if not preset.is_trained}
    assert {name for name in cells if name != "WeightsOnly"} == plain - {name for name in plain if "_MIXED_" in name}
    assert all(set(cell) == set(OPERATORS) for cell in cells.values())


def test_formats_are_written_as_files_have_them():
    rows = {row.name: row for row in format_rows()}
    model = quantize(quark.demo.network_path(), None, "MXINT8").model
    assert f"com.amd.quark.{rows['mxint8'].nodes[0].rpartition('.')[2]}" in {
        f"{node.domain}.{node.op_type}" for node in model.graph.node
    }
    assert len(rows["int16"].nodes) == len(OPSETS)
    assert rows["int16"].nodes[0].startswith("com.microsoft")
    assert not rows["int16"].nodes[1].startswith("com.")
    assert rows["bfloat16"].is_ours
    assert not rows["int8"].is_ours


def test_every_operator_has_a_row_in_both_tables():
    text = support_matrix("command")
    assert all(text.count(f"\n| {op_type} |") == 2 for op_type in OPERATORS)
