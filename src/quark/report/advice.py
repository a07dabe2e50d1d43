"""What to do next about a quantized network that is not good enough: the likeliest cause first.

Advice comes from the report alone. Each line is one thing to try; none is given for a good network. Wider presets that
were measured to be ok come first, and what was measured not to help is not suggested.
"""

from __future__ import annotations

from quark.account import Report
from quark.fidelity import Verdict
from quark.formats.catalog import FORMATS
from quark.plan import AffineChoice, BlockChoice, FloatChoice, Role
from quark.report.algorithms import BIAS_CORRECTION, CROSS_LAYER, SMOOTH

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
PRODUCTS = CONVOLUTIONS | {"MatMul", "Gemm"}
NORMALIZATIONS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})  # the sign of a transformer
FEW_SAMPLES = 32
MOST_ADVICE = 3


def advice(report: Report) -> list[str]:
    """At most three things to try, the likeliest first."""
    if report.verdict is Verdict.OK:
        return []
    if report.calibration.is_verdict_skipped:
        return ["compare the two files where there is memory for it: 'quark compare IN OUT --data DIR'"]
    if report.verdict is Verdict.UNCHECKED:
        return ["give data that the network knows: --calib DIR in the command, data= in Python"]
    tips = (_about_alternatives(report), _about_data(report), _about_algorithms(report), _about_formats(report))
    return [tip for each in tips for tip in each][:MOST_ADVICE]


def measured_alternatives(report: Report) -> list[tuple[str, str]]:
    """The wider presets that protection measured to be ok, with the figures of the worst output.

    They are in the form of trials: "A16W8: 0.05 ok, output 'logits' (classes): SQNR 34.1 dB".
    """
    facts = report.protection
    trials = (each.partition(": ") for each in (facts.alternatives if facts else ()))
    return [(name, text.partition(", ")[2]) for name, _, text in trials]


def _about_alternatives(report: Report) -> list[str]:
    found = measured_alternatives(report)
    if not found:
        return []
    name, figures = found[0]
    others = [each for each, _ in found[1:]]
    also = f"; {' and '.join(others)} {'were' if len(others) > 1 else 'was'} ok too" if others else ""
    return [f"take {name}, which was measured ok ({figures}){also}"]


def _about_data(report: Report) -> list[str]:
    facts = report.calibration
    if facts.is_random:
        what = "calibrate on" if facts.methods else "judge it on"
        return [f"{what} real data instead of random numbers: --calib DIR"]
    if not facts.methods:
        return []  # nothing was calibrated: more data would change nothing
    tips = ["check that the calibration data is prepared as in training: --preprocess"]
    if facts.samples < FEW_SAMPLES:
        tips.append(f"calibrate on more than {facts.samples} samples: 100 to 500 are usual")
    return tips if _is_collapsed(report) else tips[1:]


def _about_algorithms(report: Report) -> list[str]:
    """Those that take seconds and were not asked for, where there is something for them to do."""
    if report.calibration.is_random:
        return []  # they would fit the network to noise
    asked = {each.name for each in report.algorithms}
    op_types = set(report.op_types.values())
    useful = {
        "BiasCorrection=true": BIAS_CORRECTION not in asked and op_types & PRODUCTS and not _is_coarse(report),
        "include_cle=true": CROSS_LAYER not in asked and op_types & CONVOLUTIONS and _has_scale(report, Role.WEIGHT),
        "include_sq=true": SMOOTH not in asked and op_types & NORMALIZATIONS and _has_scale(report, Role.ACTIVATION),
    }
    wanted = [name for name, is_useful in useful.items() if is_useful]
    return [f"mend it without training: {', '.join(wanted)}"] if wanted else []


def _is_coarse(report: Report) -> bool:
    """Weights in blocks of four bits and less (MX4): there correcting biases made things worse."""
    choices = (each.choice for each in report.plan if each.role is Role.WEIGHT)
    return any(isinstance(each, BlockChoice) and FORMATS[each.format].bits_per_element <= 4 for each in choices)


def _has_scale(report: Report, role: Role) -> bool:
    """Tensors whose channels share a scale: those gain where channels are made alike."""
    choices = (each.choice for each in report.plan if each.role is role)
    return any(isinstance(each, AffineChoice) and each.axis is None for each in choices)


def _about_formats(report: Report) -> list[str]:
    facts = report.protection
    tried = {each.partition(": ")[0] for each in (facts.tried if facts else ())}
    weights = [each.choice for each in report.plan if each.role is Role.WEIGHT]
    activations = [each.choice for each in report.plan if each.role is Role.ACTIVATION]
    if any(isinstance(each, BlockChoice) for each in weights + activations):
        # protection has measured it in its own formats, or is about these
        return [] if tried else ["take a block format with more bits: MXINT8 and MX9 keep nearly everything"]
    if all(isinstance(each, FloatChoice) for each in weights + activations):
        return ["take BF16, whose range is that of float32, in place of FP16"]
    affine = [each for each in weights if isinstance(each, AffineChoice)]
    tips = []
    if affine and all(each.axis is None for each in affine):
        tips.append("give each channel its own scale: INT8_CNN_DEFAULT, or per_channel=true")
    is_narrow = any(
        isinstance(each, AffineChoice) and FORMATS[each.format].bits_per_element <= 8 for each in activations
    )
    if is_narrow and "A16W8" not in tried:
        tips.append("take 16-bit activations: A16W8, or U16S8_AAWS")
    if any(each.endswith(("sensitive layer in float", "sensitive layers in float")) for each in tried):
        return [*tips, "let protection keep more layers in float: ProtectBudget, the share of multiply-accumulates"]
    return [*tips, "leave the most sensitive nodes in float: nodes_to_exclude"]


def _is_collapsed(report: Report) -> bool:
    return report.verdict is Verdict.COLLAPSED
