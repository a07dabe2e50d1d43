"""Find where a quantized network differs from the float one, layer by layer, and what to do about it.

read -> match -> find factors -> compare -> outputs -> sensitivities -> facts, causes, remedies -> histograms
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quark.compare import numberless_remark, outputs_without_numbers
from quark.diagnosis import Basis, Diagnosis, LayerDiagnosis
from quark.errors import InvalidValueError
from quark.inspect.diagnose.advice import find_causes, find_remarks, find_remedies, first_steps
from quark.inspect.diagnose.equalized import Factors
from quark.inspect.diagnose.files import ModelFile, Side, check_pair, find_skipped, read_side, restore
from quark.inspect.diagnose.layer_facts import (
    LayerFacts,
    find_facts,
    find_weight_facts,
    input_histograms,
    weight_histogram,
)
from quark.inspect.diagnose.networks import Networks, compare_networks, differing_shapes
from quark.inspect.diagnose.running import Run
from quark.inspect.diagnose.sensitivity import Sensitivities, find_sensitivities
from quark.inspect.diagnose.sites import COMPUTING, Site, Sites, find_sites
from quark.onnx.calibrate.runner import processor_count
from quark.onnx.comparing import judge_outputs
from quark.onnx.data import Sample, Samples, input_infos, open_samples
from quark.onnx.input_files import check_unchanged
from quark.onnx.plan_reader import DYNAMIC, is_quantizing
from quark.onnx.session import release_memory

HISTOGRAM_SAMPLES = 8
SENSITIVITY_SECONDS = 120.0  # if measuring sensitivities would take longer, there are fewer samples
FEWEST_SAMPLES = 2
RUNS_A_SAMPLE = 4  # runs of the network, to compare all layers


def diagnose(  # noqa: PLR0913 - options of the public interface, by keyword
    float_model: ModelFile,
    quantized: ModelFile,
    data: Any = None,
    *,
    num_samples: int | None = 64,
    sensitivity_samples: int = 8,
    histograms: int = 12,
    batch_size: int = 1,
    preprocessing: Any = "auto",
    has_sensitivity: bool = True,
    use_random_data: bool = False,
) -> Diagnosis:
    """Compare two forms of one network on `data`, which can be all that `quark.onnx.quantize` takes. Without data it
    is an InvalidValueError, unless `use_random_data` asks for random numbers.

    Layers are compared on `num_samples` samples. Sensitivities, which take most of the time, are measured on
    `sensitivity_samples` of them, evenly spaced; on fewer for a large network of many layers. The `histograms` worst
    layers get histograms. Accuracy, speed, lint and how the file was made are not part of it, and suggestions are not
    tried.

    Raises InvalidValueError for models whose inputs or outputs differ, that are in the wrong order, or that have no
    tensor in common.
    """
    exact, other = read_side(float_model, is_float=True), read_side(quantized)
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
    wanted_samples = sensitivity_samples if has_sensitivity else 0
    sites, unusable = _match(exact, other, samples)
    networks = Networks(exact.model, other.model, sites)
    networks.find_factors(_first(samples, wanted_samples or HISTOGRAM_SAMPLES))
    start = time.process_time()  # not the clock: other programs that run must not change what is measured
    compared = compare_networks(networks, samples.in_order)
    seconds = (time.process_time() - start) / processor_count()
    run_seconds = seconds / max(compared.samples * RUNS_A_SAMPLE, 1)
    factors = networks.factors
    numberless = outputs_without_numbers(compared.outputs[index] for index in range(len(compared.outputs)))
    deployed = Run(other.model, "the quantized model", has_integer_kernels=True)
    outputs = judge_outputs(
        lambda sample, names: {name: array.copy() for name, array in deployed(sample, names).items()},
        samples.in_order(),
        compared.outputs,
        numberless,
    )
    compared.outputs.close()
    sensitivities = None
    if wanted_samples and sites.sites:
        most = int(SENSITIVITY_SECONDS / max(len(sites.sites) * run_seconds / 2, 1e-9))
        count = min(wanted_samples, max(FEWEST_SAMPLES, most), compared.samples)
        spread = {index * compared.samples // count for index in range(count)}
        chosen = [sample for index, sample in enumerate(samples.in_order()) if index in spread]
        sensitivities = find_sensitivities(exact.model, other.model, sites, factors, chosen)
    release_memory()
    facts = [find_facts(site, compared, exact.model, other.model, factors) for site in sites.sites]
    skipped = find_skipped(other)
    findings = _Findings(exact, other, sites, factors, sensitivities, facts, {entry.node for entry in skipped})
    layers = tuple(_layers(findings, _first(samples, HISTOGRAM_SAMPLES), histograms))
    check_unchanged((*exact.files, *other.files))
    remarks = find_remarks(
        sites, factors, sensitivities, min(sensitivity_samples, compared.samples), unusable, restored
    )
    return Diagnosis(
        exact.facts,
        other.facts,
        Basis(
            samples.source,
            compared.samples,
            samples.is_random,
            0 if sensitivities is None else sensitivities.samples,
            "" if sensitivities is None else sensitivities.measure,
        ),
        outputs,
        layers,
        skipped,
        find_weight_facts(exact.model, other.model, facts),
        steps=first_steps(layers),
        remarks=(
            *(f"float model: {remark}" for remark in exact.remarks),
            *remarks,
            *map(numberless_remark, numberless),
        ),
    )


def _match(exact: Side, other: Side, samples: Samples) -> tuple[Sites, list[str]]:
    """The layers, and the tensors that were left out because their shapes differ. Raises an error with the likeliest
    reason if there is no layer to look at."""
    sites = find_sites(exact.model, other.model)
    unusable = differing_shapes(exact.model, other.model, sites.shared, next(samples.in_order()))
    if unusable:
        sites = find_sites(exact.model, other.model, unusable)
    outputs = {str(value.name) for value in exact.model.graph.outputs}
    is_deep = sum(node.op_type in COMPUTING for node in exact.model.graph) > 1
    if sites.sites and not (is_deep and not set(sites.shared) - outputs):
        return sites, unusable
    operators = {node.op_type for node in other.model.graph}
    if DYNAMIC in operators:
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


@dataclass(frozen=True, eq=False)
class _Findings:
    """The results of all measurements. `in_float` names the nodes that stayed in float."""

    exact: Side
    other: Side
    sites: Sites
    factors: Factors
    sensitivities: Sensitivities | None
    facts: list[LayerFacts]
    in_float: Collection[str]


def _layers(findings: _Findings, samples: Sequence[Sample], histograms: int) -> Iterator[LayerDiagnosis]:
    """Combine the results for each layer, with histograms for the worst."""
    models = findings.exact.model, findings.other.model
    costs = {} if findings.sensitivities is None else findings.sensitivities.values
    ranked = sorted(costs, key=lambda name: -costs[name])
    worst = ranked or [layer.site.tensor for layer in sorted(findings.facts, key=lambda layer: layer.local.sqnr_db)]
    chosen: list[Site] = [site for site in findings.sites.sites if site.tensor in worst[:histograms]]
    pictures = input_histograms(chosen, *models, findings.sites, findings.factors, samples)
    total = sum(costs.values())
    for facts in findings.facts:
        site, weight, cost = facts.site, facts.site.weight, costs.get(facts.site.tensor)
        share = None
        if cost is not None:
            share = cost / total if 0 < total < math.inf else 0.0 if cost < math.inf else 1.0
        yield LayerDiagnosis(
            site.name,
            site.node.op_type,
            site.tensor,
            site.order,
            "" if weight is None else weight.format,
            ", ".join(dict.fromkeys(operand.format for operand in site.inputs)),
            facts.parameters,
            None if weight is None else weight.bits,
            facts.local,
            facts.accumulated,
            sensitivity=cost,
            rank=None if cost is None else ranked.index(site.tensor) + 1,
            share=share,
            clipped=facts.clipped,
            causes=find_causes(facts, share),
            remedies=find_remedies(facts, findings.other.config, share, findings.in_float),
            nodes=site.nodes,
            weight_histogram=weight_histogram(site, *models, findings.factors) if site in chosen else None,
            input_histogram=pictures.get(site.tensor),
        )
