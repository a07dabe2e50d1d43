"""The summary says the verdict first and everything that matters, in a screenful."""

import io
import json
from dataclasses import replace

import pytest
from reports import make_report
from rich.console import Console

from quark.account import AlgorithmFacts, CalibrationFacts, ProtectedLayer, ProtectionFacts
from quark.compare import OutputFidelity, PartFidelity
from quark.formats import get_format
from quark.formats.block import BlockQuantizer
from quark.plan import AffineChoice, BlockChoice, QuantizationPlan, Role, SkippedNode
from quark.report.algorithms import NPU_POSITIONS, SMOOTH, idle_remark
from quark.report.summary import PROTECTED, advice, print_summary, report_json, summary_text

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


SCORES = PartFidelity("channels 4..21 of axis 1", "scores", "overlap of scores", 0.71, 3, 0.12, severity=2.4)
BOXES = PartFidelity("channels 0..3 of axis 1", "values", "SQNR", 31.0, 1, 27.0, severity=0.0)


def test_the_worst_part_and_its_worst_sample_are_named():
    output = OutputFidelity("output0", 0.99, 31.0, kind="values, scores", parts=(BOXES, SCORES), worst_sample=3)
    report = make_report(outputs=(output,))
    text = " ".join(summary_text(report).replace("|", " ").split())
    assert text.startswith("+- COLLAPSED")
    named = "output 'output0' channels 4..21 of axis 1 (scores): overlap of scores 0.71, and 0.12 on"
    assert f"Worst of 8 held-out samples: {named} held-out sample 3" in text
    assert f"- {named} sample 3: collapsed" in text
    assert "channels 0..3" not in text
    (content,) = report_json(report)["outputs"]
    assert [part["verdict"] for part in content["parts"]] == ["ok", "collapsed"]
    assert content["parts"][1]["worst_sample"] == 3


def test_a_good_verdict_says_on_what_and_how_good_the_worst_part_is():
    text = " ".join(summary_text(make_report("ok")).split())
    assert text.startswith("OK: outputs agree with the float network on 8 held-out samples (worst: output 'logits'")
    assert "does what the float network does" not in text


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
    assert "SmoothQuant: changed nothing: its weight is no constant" in lines
    assert "applied" not in lines
    assert "algorithms" not in summary_text(make_report())


def test_an_algorithm_that_changed_nothing_is_told_once():
    idle, npu = (
        AlgorithmFacts(SMOOTH, ()),
        AlgorithmFacts(NPU_POSITIONS, ("a",), (SkippedNode("x", "Conv", "beyond 8 bits"),)),
    )
    remarks = ("another remark", *(str(idle_remark(value)) for value in (idle, npu)))
    text = " ".join(summary_text(make_report(algorithms=(idle, npu), remarks=remarks)).split())
    assert text.count("found nothing to do") == 1
    assert "- another remark" in text
    assert "- 1 limit of the NPU not kept: beyond 8 bits" in text


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
    assert "--set BiasCorrection=true --set include_cle=true" in advised(make_report("degraded"))
    assert "include_sq" not in advised(make_report("degraded"))  # no transformer
    corrected = make_report("degraded", algorithms=(AlgorithmFacts("bias correction", ("conv0",)),))
    assert "BiasCorrection" not in advised(corrected)
    assert "include_cle=true" in advised(corrected)
    idle = AlgorithmFacts("cross-layer equalization", ())
    both = make_report("degraded", algorithms=(*corrected.algorithms, idle))
    assert "include_cle" not in advised(both)
    assert "without training" not in advised(both)


@pytest.mark.parametrize(("op_type", "tip"), [("If", "EnableSubgraph=true"), ("Softmax", "reason for each node")])
def test_a_file_in_which_nothing_was_quantized_says_so(op_type, tip):
    """silero-vad lies in an If as a whole. Samples were given, so asking for some is no advice."""
    plan = QuantizationPlan((), (SkippedNode("branch", op_type, "stays in float"),))
    text = " ".join(summary_text(make_report("unchecked", plan=plan, outputs=())).split())
    assert "Nothing was quantized." in text
    assert tip in text
    assert "give realistic data" not in text


@pytest.mark.parametrize(
    ("reasons", "rows"), [(["a"], "'in float'"), ([f"{PROTECTED}b"], "'protected'"), (["a", f"{PROTECTED}b"], "or")]
)
def test_the_reasons_are_in_the_rows_that_are_named(reasons, rows):
    nodes = tuple(SkippedNode(f"n{i}", "Conv", reason) for i, reason in enumerate(reasons))
    report = make_report("unchecked", plan=QuantizationPlan((), nodes), outputs=())
    assert f"{rows} " in advised(report)


def test_advice_for_transformers_and_random_data():
    op_types = {"norm": "LayerNormalization", "mm": "MatMul"}
    assert "--set BiasCorrection=true --set include_sq=true" in advised(make_report("degraded", op_types=op_types))
    facts = CalibrationFacts("random", 8, 0, ("MinMax",), is_random=True, is_verdict_on_calibration=True)
    assert "BiasCorrection" not in advised(make_report("collapsed", calibration=facts))


def test_advice_for_scales_of_channels_leaves_them_be():
    channels = AffineChoice("int8", (0.1, 0.2), (0, 0), 0)
    tensors = tuple(
        replace(tensor, choice=channels) if tensor.role is Role.WEIGHT else tensor
        for tensor in make_report().plan.tensors
    )
    report = make_report("degraded", plan=QuantizationPlan(tensors))
    assert "include_cle" not in advised(report)
    assert "BiasCorrection=true" in advised(report)


def test_advice_for_four_bits_in_blocks_corrects_no_biases():
    mx4, mx6 = (BlockChoice(BlockQuantizer(get_format(name)), 1) for name in ("mx4", "mx6"))
    for choice, is_advised in ((mx4, False), (mx6, True)):
        tensors = tuple(
            replace(tensor, choice=choice) if tensor.role is Role.WEIGHT else tensor
            for tensor in make_report().plan.tensors
        )
        assert ("BiasCorrection" in advised(make_report("degraded", plan=QuantizationPlan(tensors)))) is is_advised


SKIPPED = tuple(
    SkippedNode(name, op_type, f"protected: {reason}")
    for name, op_type, reason in (
        ("head/concat", "Concat", "post-processing behind the last layers"),
        ("head/scores", "Sigmoid", "post-processing behind the last layers"),
        ("model/conv7", "Conv", "the output is sensitive to it"),
        ("softmax", "Softmax", "attention"),
    )
)
LAYER = ProtectedLayer("model/conv7", "Conv", "float", "the output is sensitive to it", 0.0421)
FOUND = ProtectionFacts(
    structures=("head/concat", "head/scores", "softmax"),
    layers=(LAYER,),
    methods={"MinMSE": 12, "Percentile 99.999": 4},
    float_mac_share=0.0421,
    extra_weight_bytes=21_000,
    before="2.10 collapsed, output 'logits' (scores): overlap of scores 0.31",
    after="0.20 ok, output 'logits' (scores): overlap of scores 0.97",
    tried=("as configured: 2.10 collapsed, ...", "2 sensitive layers in float: 0.20 ok, ..."),
)
FAILED = ProtectionFacts(
    before="2.10 collapsed, output 'logits' (scores): overlap of scores 0.31",
    tried=(
        "as configured: 2.10 collapsed, ...",
        "A16W8: 1.40 degraded, output 'logits' (scores): overlap of scores 0.70",
        "MXINT8: 0.30 ok, output 'logits' (scores): overlap of scores 0.96",
        "BF16: 0.02 ok, output 'logits' (scores): overlap of scores 1.00",
    ),
    alternatives=(
        "MXINT8: 0.30 ok, output 'logits' (scores): overlap of scores 0.96",
        "BF16: 0.02 ok, output 'logits' (scores): overlap of scores 1.00",
    ),
)


def flat(report) -> str:
    return " ".join(summary_text(report).replace("|", " ").split())


def test_what_was_protected_is_listed_with_reasons_and_cost():
    plain = make_report()
    report = make_report(plan=QuantizationPlan(plain.plan.tensors, (*plain.plan.skipped, *SKIPPED)), protection=FOUND)
    text = flat(report)
    assert "in float 3 Softmax: no integer kernel for it protected 1 Concat, 1 Sigmoid: post-processing" in text
    assert "1 Softmax: attention" in text
    assert "1 sensitive layer in float, with percent of all multiply-accumulates: 'model/conv7' (Conv, 4.2 %)" in text
    assert "ranges chosen by the outputs: 12 MinMSE, 4 Percentile 99.999" in text
    assert "4.2 % of multiply-accumulates are not in 8 bits, which adds 21.0 KB of weights" in text
    assert "2 networks tried; without protection: collapsed, output 'logits' (scores): overlap of scores 0.31" in text
    assert "protected: " not in text
    assert max(map(len, summary_text(report).splitlines())) <= 80
    assert report_json(report)["protection"]["layers"][0]["node"] == "model/conv7"
    assert report_json(report)["protection"]["tried"] == list(FOUND.tried)


def test_nothing_protected_has_no_row():
    assert "protected" not in summary_text(make_report())


def test_structures_alone_claim_no_cost_and_no_trials():
    report = make_report(
        plan=QuantizationPlan((), SKIPPED[:2]), protection=ProtectionFacts(structures=("head/concat",))
    )
    text = flat(report)
    assert "protected 1 Concat, 1 Sigmoid: post-processing behind the last layers" in text
    assert "tried" not in text
    assert "multiply-accumulates" not in text


def test_presets_that_were_measured_come_first_where_8_bits_do_not_do():
    report = make_report("collapsed", protection=FAILED)
    text = flat(report)
    assert "protected 4 networks tried; no change in 8 bits was better" in text
    assert "MXINT8 was measured ok: output 'logits' (scores): overlap of scores 0.96" in text
    assert "BF16 was measured ok: output 'logits' (scores): overlap of scores 1.00" in text
    tips = advice(report)
    figures = "output 'logits' (scores): overlap of scores 0.96"
    assert tips[0] == f"take MXINT8, which was measured ok ({figures}); BF16 was ok too"
    assert f"- try: take MXINT8, which was measured ok ({figures})" in text
    assert "A16W8" not in advised(report)  # it was measured, and is not ok
    assert advice(make_report("ok", protection=FAILED)) == []
    assert "was measured ok" not in flat(make_report("ok", protection=FAILED))


def test_after_a_search_of_layers_the_budget_is_what_to_change():
    facts = CalibrationFacts("folder calib", 500, 8, ("MinMax",))
    channels = AffineChoice("int8", (0.1, 0.2), (0, 0), 0)
    tensors = tuple(
        replace(tensor, choice=channels) if tensor.role is Role.WEIGHT else tensor
        for tensor in make_report().plan.tensors
    )
    found = replace(FAILED, tried=(*FAILED.tried, "8 sensitive layers in float: 1.2 degraded, ..."))
    fields = {"plan": QuantizationPlan(tensors), "calibration": facts}
    assert "ProtectBudget" in advised(make_report("degraded", protection=found, **fields))
    assert "nodes_to_exclude" not in advised(make_report("degraded", protection=found, **fields))
    assert "nodes_to_exclude" in advised(make_report("degraded", protection=FAILED, **fields))


def test_names_of_protected_layers_do_not_steer_the_terminal():
    layer = replace(LAYER, node="conv\x1b[2J[red]")
    text = summary_text(make_report(protection=replace(FOUND, layers=(layer,))))
    assert "\x1b" not in text
    assert "conv\\x1b[2J[red]" in text
