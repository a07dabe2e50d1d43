"""Find where a quantized network differs from the float one, layer by layer, and what to do about it.

read -> match -> find factors -> compare -> outputs -> sensitivities -> facts, causes, remedies -> histograms
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quark.diagnosis import Basis, Diagnosis, LayerDiagnosis
from quark.errors import InvalidValueError
from quark.fidelity import numberless_remark, outputs_without_numbers
from quark.onnx.calibrate.runner import processor_count
from quark.onnx.data import Sample, Samples, input_infos, open_samples
from quark.onnx.diagnose.causes import find_causes
from quark.onnx.diagnose.comparison import Compared, compare_networks
from quark.onnx.diagnose.histograms import input_histograms, weight_histogram
from quark.onnx.diagnose.layer_facts import LayerFacts, find_facts
from quark.onnx.diagnose.networks import Networks, differing_shapes
from quark.onnx.diagnose.operands import is_quantizing
from quark.onnx.diagnose.outputs import compare_outputs
from quark.onnx.diagnose.pair import ModelFile, Side, check_pair, read_side
from quark.onnx.diagnose.remarks import first_steps, remarks_on, remarks_on_form
from quark.onnx.diagnose.remedies import find_remedies
from quark.onnx.diagnose.rescaling import Factors
from quark.onnx.diagnose.restored import restore
from quark.onnx.diagnose.sensitivity import Sensitivities, find_sensitivities
from quark.onnx.diagnose.sites import COMPUTING, Site, Sites, find_sites
from quark.onnx.diagnose.skipped import find_skipped
from quark.onnx.diagnose.weight_facts import find_weight_facts
from quark.onnx.input_files import check_unchanged
from quark.onnx.session import release_memory

HISTOGRAM_SAMPLES = 8
SENSITIVITY_SECONDS = 120.0  # if measuring sensitivities would take longer, there are fewer samples
FEWEST_SAMPLES = 2
RUNS_A_SAMPLE = 4  # of the network, to compare all layers


def diagnose(
    float_model: ModelFile,
    quantized: ModelFile,
    data: Any = None,
    *,
    num_samples: int | None = 64,
    sensitivity_samples: int = 8,
    histograms: int = 12,
    batch_size: int = 1,
    preprocessing: Any = "imagenet",
    has_sensitivity: bool = True,
    use_random_data: bool = False,
) -> Diagnosis:
    """Compare two forms of one network on `data`, which can be all that `quark.onnx.quantize` takes. Without data it
    is an InvalidValueError, unless `use_random_data` asks for random numbers.

    `num_samples` are looked at, and `sensitivity_samples` of them, evenly spaced, for sensitivities, which take most of
    the time: fewer for a large network of many layers. The `histograms` worst layers have pictures. Accuracy, speed,
    lint and the making of the file are not looked at here, and suggestions are not tried.

    Models with other inputs or outputs than each other, in the wrong order, or without one tensor in common are an
    InvalidValueError.
    """
    exact, other = read_side(float_model), read_side(quantized)
    check_pair(exact, other)
    if (data is None) != use_random_data:
        raise InvalidValueError(
            "the models are compared on data: give --calib (in Python: data), or ask for random numbers with --random "
            "(in Python: use_random_data=True), and not for both"
        )
    restored = restore(exact.model, other.model)
    samples = open_samples(
        data, input_infos(exact.model), count=num_samples, batch_size=batch_size, preprocessing=preprocessing
    )
    looked = _look(exact, other, samples, sensitivity_samples if has_sensitivity else 0)
    skipped = find_skipped(other)
    in_float = {each.node for each in skipped}
    layers = _layers(exact, other, looked, _first(samples, HISTOGRAM_SAMPLES), histograms, in_float)
    facts = list(looked.facts)
    found = looked.sensitivities
    check_unchanged((*exact.files, *other.files))
    return Diagnosis(
        exact.facts,
        other.facts,
        _basis(samples, looked),
        looked.outputs,
        layers,
        skipped,
        find_weight_facts(exact.model, other.model, facts),
        steps=first_steps(layers),
        remarks=remarks_on(
            exact,
            looked.sites,
            looked.factors,
            found,
            min(sensitivity_samples, looked.compared.samples),
            looked.unusable,
        )
        + remarks_on_form(restored)
        + tuple(map(numberless_remark, looked.numberless)),
    )


@dataclass(frozen=True, eq=False)
class _Looked:
    sites: Sites
    unusable: tuple[str, ...]
    factors: Factors
    compared: Compared
    outputs: Any
    numberless: Sequence[str]
    sensitivities: Sensitivities | None
    facts: tuple[LayerFacts, ...]


def _basis(samples: Samples, looked: _Looked) -> Basis:
    found = looked.sensitivities
    return Basis(
        samples.source,
        looked.compared.samples,
        samples.is_random,
        0 if found is None else found.samples,
        "" if found is None else found.measure,
    )


def _look(exact: Side, other: Side, samples: Samples, sensitivity_samples: int) -> _Looked:
    sites, unusable = _match(exact, other, samples)
    networks = Networks(exact.model, other.model, sites)
    networks.find_factors(_first(samples, sensitivity_samples or HISTOGRAM_SAMPLES))
    start = time.process_time()  # not the clock: other programs that run must not change what is measured
    compared = compare_networks(networks, samples.in_order)
    seconds = (time.process_time() - start) / processor_count()
    run_seconds = seconds / max(compared.samples * RUNS_A_SAMPLE, 1)
    factors = networks.factors
    numberless = outputs_without_numbers(compared.outputs[index] for index in range(len(compared.outputs)))
    outputs = compare_outputs(other.model, samples.in_order(), compared.outputs, numberless)
    compared.outputs.close()
    found = None
    if sensitivity_samples and sites.sites:
        most = int(SENSITIVITY_SECONDS / max(len(sites.sites) * run_seconds / 2, 1e-9))
        count = min(sensitivity_samples, max(FEWEST_SAMPLES, most), compared.samples)
        found = find_sensitivities(exact.model, other.model, sites, factors, _spread(samples, compared.samples, count))
    release_memory()
    facts = tuple(find_facts(site, compared, exact.model, other.model, factors) for site in sites.sites)
    return _Looked(sites, unusable, factors, compared, outputs, numberless, found, facts)


def _match(exact: Side, other: Side, samples: Samples) -> tuple[Sites, tuple[str, ...]]:
    """The layers, once the tensors are left out that turn out to be no match."""
    sites = find_sites(exact.model, other.model)
    unusable = differing_shapes(exact.model, other.model, sites.shared, next(samples.in_order()))
    if unusable:
        sites = find_sites(exact.model, other.model, unusable)
    _refuse_strangers(exact, other, sites)
    return sites, tuple(unusable)


def _refuse_strangers(exact: Side, other: Side, sites: Sites) -> None:
    """An error where there is no layer to look at, with the likeliest reason."""
    outputs = {str(value.name) for value in exact.model.graph.outputs}
    is_deep = sum(node.op_type in COMPUTING for node in exact.model.graph) > 1
    if sites.sites and not (is_deep and not set(sites.shared) - outputs):
        return
    operators = {node.op_type for node in other.model.graph}
    if "DynamicQuantizeLinear" in operators:
        raise InvalidValueError(
            f"'{other.facts.name}' is quantized dynamically: layers whose inputs get their scales while the network "
            "runs are not looked at one by one. 'quark compare' compares the networks as a whole"
        )
    if not operators & COMPUTING and not any(is_quantizing(node) for node in other.model.graph):
        raise InvalidValueError(
            f"'{other.facts.name}' has no quantized layer: nothing in it is quantized, so there is nothing to compare "
            "layer by layer. 'quark inspect' shows what the file holds"
        )
    raise InvalidValueError(
        f"'{exact.facts.name}' and '{other.facts.name}' have no layer in common: no tensor inside them has the "
        "same name and shape in both. Give the float model that the other was made from, as the quantizer read it"
    )


def _first(samples: Samples, count: int) -> list[Sample]:
    return list(islice(samples.in_order(), count))


def _spread(samples: Samples, total: int, count: int) -> list[Sample]:
    """`count` of the samples, evenly spaced."""
    wanted = {index * total // count for index in range(count)}
    return [sample for index, sample in enumerate(samples.in_order()) if index in wanted]


def _layers(
    exact: Side,
    other: Side,
    looked: _Looked,
    samples: Sequence[Sample],
    histograms: int,
    in_float: Collection[str],
) -> tuple[LayerDiagnosis, ...]:
    costs = {} if looked.sensitivities is None else looked.sensitivities.values
    ranked = sorted(costs, key=lambda name: -costs[name])
    worst = ranked or [f.site.tensor for f in sorted(looked.facts, key=lambda each: each.local.sqnr_db)]
    chosen: list[Site] = [site for site in looked.sites.sites if site.tensor in worst[:histograms]]
    pictures = input_histograms(chosen, exact.model, other.model, looked.sites, looked.factors, samples)
    total = sum(costs.values())
    layers = []
    for facts in looked.facts:
        name = facts.site.tensor
        share = _share(costs.get(name), total)
        is_pictured = name in worst[:histograms]
        layers.append(
            _layer(
                facts,
                other,
                share,
                in_float,
                sensitivity=costs.get(name),
                rank=ranked.index(name) + 1 if name in costs else None,
                weight_histogram=(
                    weight_histogram(facts.site, exact.model, other.model, looked.factors) if is_pictured else None
                ),
                input_histogram=pictures.get(name),
            )
        )
    return tuple(layers)


def _share(cost: float | None, total: float) -> float | None:
    if cost is None:
        return None
    return cost / total if 0 < total < float("inf") else 0.0 if cost < float("inf") else 1.0


def _layer(
    facts: LayerFacts, other: Side, share: float | None, in_float: Collection[str], **figures: Any
) -> LayerDiagnosis:
    site, weight = facts.site, facts.site.weight
    return LayerDiagnosis(
        site.name,
        site.node.op_type,
        site.tensor,
        site.order,
        "" if weight is None else weight.format,
        ", ".join(dict.fromkeys(each.format for each in site.inputs)),
        facts.parameters,
        None if weight is None else weight.bits,
        facts.local,
        facts.accumulated,
        share=share,
        clipped=facts.clipped,
        causes=find_causes(facts, share),
        remedies=find_remedies(facts, other.config, share, in_float),
        nodes=site.nodes,
        **figures,
    )
