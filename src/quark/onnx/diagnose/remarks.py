"""What a reader should know of how the figures came about, and what to do first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quark.diagnosis import LayerDiagnosis, Step
from quark.onnx.diagnose.pair import Side
from quark.onnx.diagnose.rescaling import Factors
from quark.onnx.diagnose.restored import Restored
from quark.onnx.diagnose.sensitivity import Sensitivities
from quark.onnx.diagnose.sites import Sites
from quark.report.quantities import count_of, listed
from quark.text import setting, shell_command

WORST = 3
WORTH_IT = 0.25  # share of the damage that the worst layers make up


def remarks_on(
    exact: Side,
    sites: Sites,
    factors: Factors,
    found: Sensitivities | None,
    wanted_samples: int,
    unusable: Sequence[str],
) -> tuple[str, ...]:
    return tuple(_remarks(exact, sites, factors, found, wanted_samples, unusable))


def _remarks(
    exact: Side,
    sites: Sites,
    factors: Factors,
    found: Sensitivities | None,
    wanted_samples: int,
    unusable: Sequence[str],
) -> Iterator[str]:
    yield (
        "layers are compared with quantizers computed as they stand; outputs as the runtime deploys the file, with "
        "integer kernels"
    )
    if factors:
        yield (
            f"the network was equalized: {count_of(len(factors), 'tensor')} of it are the float ones times a factor "
            "for each channel, which was found from the weights and taken out before comparing"
        )
    if sites.lost:
        yield (
            f"{count_of(len(sites.lost), 'quantized node')} without a result that the float network has too count with "
            f"the next layer: {listed(sites.lost, 3)}"
        )
    if unusable:
        yield f"not compared, because shapes differ: {listed(unusable, 3)}"
    if found is not None and found.samples < wanted_samples:
        yield f"sensitivities are of {count_of(found.samples, 'sample')}, because more would have taken too long"


def remarks_on_form(restored: Restored) -> tuple[str, ...]:
    """What was put back into the file to compare it."""
    found = []
    if restored.activations:
        what = count_of(restored.activations, "Relu or Clip node")
        found.append(f"{what} that the file leaves to the quantizers behind were put back to compare")
    if restored.codes:
        what = count_of(restored.codes, "operator")
        found.append(f"{what} on codes: their results are compared after they are rounded to codes")
    return tuple(found)


def first_steps(layers: Sequence[LayerDiagnosis]) -> tuple[Step, ...]:
    """To leave the worst layers in float, where they are to blame for much."""
    worst = sorted((each for each in layers if each.share and each.weights), key=lambda each: -(each.share or 0))[
        :WORST
    ]
    share = sum(each.share or 0 for each in worst)
    if not worst or share < WORTH_IT:
        return ()
    parameters = sum(each.parameters for each in layers) or 1
    cost = 100 * sum(each.parameters for each in worst) / parameters
    names = [node for each in worst for node in each.nodes]
    text = (
        f"leave the {len(worst)} most sensitive layers in float ({100 * share:.0f} % of the damage, {cost:.1f} % of "
        "the parameters; not tried)"
    )
    return (Step(text, shell_command(["--set", setting("nodes_to_exclude", names)])),)
