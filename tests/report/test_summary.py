"""The summary says the verdict first and everything that matters, in a screenful."""

import io
import json
from dataclasses import replace

import pytest
from reports import make_report
from rich.console import Console

from quark.account import AlgorithmFacts, CalibrationFacts
from quark.fidelity import OutputFidelity
from quark.formats import get_format
from quark.formats.block import BlockQuantizer
from quark.plan import AffineChoice, BlockChoice, QuantizationPlan, Role, SkippedNode
from quark.report.advice import advice
from quark.report.summary import print_summary, report_json, summary_text

VERDICTS = ["ok", "degraded", "collapsed", "unchecked"]


@pytest.mark.parametrize("verdict", VERDICTS)
def test_plain_text_of_80_columns_with_the_verdict_on_top(verdict):
    text = summary_text(make_report(verdict))
    assert verdict.upper() in text.splitlines()[0]
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 30
    assert "\x1b" not in text
    text.encode("ascii")


def test_all_facts_are_there():
    text = summary_text(make_report())
    for fact in ("float.onnx", "13.6 MB", "small.onnx", "3.5 MB", "25.7 %", "XINT8", "5 uint8", "5 int8", "5 Conv"):
        assert fact in text
    for fact in ("3 Softmax", "no integer kernel", "24 samples", "folder calib", "power-of-two MinMSE", "8 held-out"):
        assert fact in text
    for fact in ("logits", "0.9991", "27.4", "97.0 %", "fold batch norm", "opset lifted from 11 to 13"):
        assert fact in text


@pytest.mark.parametrize("verdict", ["degraded", "collapsed"])
def test_a_bad_verdict_is_framed_coloured_and_says_what_to_try(verdict):
    stream = io.StringIO()
    print_summary(make_report(verdict), Console(file=stream, width=80, force_terminal=True, color_system="standard"))
    first = stream.getvalue().splitlines()[0]
    assert "\x1b[1;3" in first
    assert verdict.upper() in first
    assert "try:" in stream.getvalue()
    assert "try:" not in summary_text(make_report("ok"))


def test_random_calibration_is_said_loudly():
    facts = CalibrationFacts("random", 8, 0, ("MinMax",), is_random=True, is_verdict_on_calibration=True)
    report = make_report("collapsed", calibration=facts)
    text = summary_text(report)
    assert "RANDOM NUMBERS" in text
    assert "8 random samples" in text
    assert "real data" in advice(report)[0]


def test_verdict_on_calibration_samples_is_said():
    facts = CalibrationFacts("folder", 2, 0, ("MinMax",), is_verdict_on_calibration=True)
    assert "2 calibration samples" in summary_text(make_report(calibration=facts))


def test_many_outputs_reasons_and_remarks_are_cut():
    outputs = tuple(OutputFidelity(f"out{i}", 0.99, 40.0 - i) for i in range(30))
    skipped = tuple(SkippedNode(f"n{i}", f"Op{i}", f"reason {i % 12}") for i in range(60))
    report = make_report(outputs=outputs, remarks=tuple(f"remark {i}" for i in range(40)))
    text = summary_text(replace(report, plan=QuantizationPlan(report.plan.tensors, skipped)))
    assert len(text.splitlines()) <= 40
    assert "out29" in text  # the worst
    assert "24 more" in text
    assert "8 other reasons" in text
    assert "35 more remarks" in text


def test_names_are_not_read_as_markup():
    outputs = (OutputFidelity("[bold]x[/]", 0.99, 40.0),)
    text = summary_text(make_report(outputs=outputs, remarks=("node '[red]' stays",)))
    assert "[bold]x[/]" in text
    assert "'[red]'" in text


def test_a_reason_that_names_the_operator_is_told_once_for_all():
    skipped = tuple(
        SkippedNode(f"{op}{i}", op, f"operator type {op} is not quantized") for op in ("Add", "Clip") for i in "ab"
    )
    text = summary_text(make_report(plan=QuantizationPlan((), skipped)))
    assert "2 Add, 2 Clip: operator type is not quantized" in text


def test_formats_that_need_no_ranges():
    facts = CalibrationFacts("16 images of calib", 0, 16)
    assert "none needed; verdict on 16 images of calib" in summary_text(make_report(calibration=facts))
    corrected = make_report(calibration=facts, algorithms=(AlgorithmFacts("bias correction", ("conv0",)),))
    assert "none needed; algorithms and verdict on 16 images of calib" in summary_text(corrected)


def test_algorithms_have_a_line_each():
    left = tuple(SkippedNode(f"c{i}", "Conv", "its weight is shared") for i in range(3))
    facts = (
        AlgorithmFacts("cross-layer equalization", tuple(f"region {i}" for i in range(17)), left),
        AlgorithmFacts("SmoothQuant", (), (SkippedNode("mm", "MatMul", "its weight is no constant"),)),
    )
    lines = " ".join(summary_text(make_report(algorithms=facts)).split())
    assert "algorithms cross-layer equalization: 17 regions; left 3: its weight is shared" in lines
    assert "SmoothQuant: found nothing to do: its weight is no constant" in lines
    assert "applied" not in lines
    assert "algorithms" not in summary_text(make_report())


def test_empty_plan():
    assert "nothing" in summary_text(make_report(plan=QuantizationPlan(()), op_types={}))


def test_report_json_is_the_files_content():
    report = make_report("collapsed")
    assert report_json(report) == json.loads(report.to_json())
    assert report_json(report)["outputs"][0]["sqnr_db"] == "-inf"


def test_advice_fits_the_formats():
    assert advice(make_report("ok")) == []
    assert any("per_channel" in tip for tip in advice(make_report("degraded")))
    assert all(len(advice(make_report(verdict))) <= 3 for verdict in VERDICTS)


def advised(report) -> str:
    return "; ".join(advice(report))


def test_advice_names_the_algorithms_that_were_not_asked_for():
    assert "BiasCorrection=true, include_cle=true" in advised(make_report("degraded"))
    assert "include_sq" not in advised(make_report("degraded"))  # no transformer
    corrected = make_report("degraded", algorithms=(AlgorithmFacts("bias correction", ("conv0",)),))
    assert "BiasCorrection" not in advised(corrected)
    assert "include_cle=true" in advised(corrected)
    idle = AlgorithmFacts("cross-layer equalization", ())
    both = make_report("degraded", algorithms=(*corrected.algorithms, idle))
    assert "include_cle" not in advised(both)
    assert "without training" not in advised(both)


def test_advice_for_transformers_and_random_data():
    op_types = {"norm": "LayerNormalization", "mm": "MatMul"}
    assert "BiasCorrection=true, include_sq=true" in advised(make_report("degraded", op_types=op_types))
    facts = CalibrationFacts("random", 8, 0, ("MinMax",), is_random=True, is_verdict_on_calibration=True)
    assert "BiasCorrection" not in advised(make_report("collapsed", calibration=facts))


def test_advice_for_scales_of_channels_leaves_them_be():
    channels = AffineChoice("int8", (0.1, 0.2), (0, 0), 0)
    tensors = tuple(
        replace(each, choice=channels) if each.role is Role.WEIGHT else each for each in make_report().plan.tensors
    )
    report = make_report("degraded", plan=QuantizationPlan(tensors))
    assert "include_cle" not in advised(report)
    assert "BiasCorrection=true" in advised(report)


def test_advice_for_four_bits_in_blocks_corrects_no_biases():
    mx4, mx6 = (BlockChoice(BlockQuantizer(get_format(name)), 1) for name in ("mx4", "mx6"))
    for choice, is_advised in ((mx4, False), (mx6, True)):
        tensors = tuple(
            replace(each, choice=choice) if each.role is Role.WEIGHT else each for each in make_report().plan.tensors
        )
        assert ("BiasCorrection" in advised(make_report("degraded", plan=QuantizationPlan(tensors)))) is is_advised
