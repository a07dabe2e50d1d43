"""The report of one quantization: what was done to a file and why, and the quality of the result.

Summaries, JSON and pages are made from it. It contains nothing that differs from run to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quark.compare import OutputFidelity, Verdict, overall_verdict
from quark.features.mixed_precision.plan import MixedPlan
from quark.files.indented import indented_json
from quark.measures import MeasureResult
from quark.plan import QuantizationPlan, Role, SkippedNode


@dataclass(frozen=True)
class FileFacts:
    """A model file: its name without folders, its size including external data, and a hash of its content.

    Without external data, `sha256` is the SHA-256 of the file. With external data, it is the SHA-256 of the bytes of
    the model file followed by the SHA-256 digests (32 bytes each) of the external files, sorted by path.
    """

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class CalibrationFacts:
    """The data behind the ranges: `samples` for calibration, run in `batches`, and `held_out` for the verdict.

    `judged` are the samples of the verdict if those held out were too few to show what the others show; else 0.
    """

    source: str
    samples: int
    held_out: int
    methods: tuple[str, ...] = ()
    is_random: bool = False
    is_verdict_on_calibration: bool = False
    is_verdict_skipped: bool = False  # not enough memory: a remark says how much is needed
    preprocessing: str = ""  # how image files were preprocessed, in words
    batches: int = 0
    judged: int = 0
    is_network_random: bool = False  # two runs of the float network differ: a remark says by how much


@dataclass(frozen=True)
class Rewrite:
    """A graph rewrite that was applied `count` times."""

    name: str
    count: int


@dataclass(frozen=True)
class AlgorithmFacts:
    """The changes made by an accuracy algorithm, a phrase each, and the nodes that it left unchanged, with the reason.
    If nothing changed, the summary says so."""

    name: str
    changed: tuple[str, ...]
    left: tuple[SkippedNode, ...] = ()


@dataclass(frozen=True)
class ProtectedLayer:
    """A layer that protection gave a wider type, why, and its share of the network's multiply-accumulates."""

    node: str
    op_type: str
    type: str
    reason: str
    mac_share: float


@dataclass(frozen=True)
class ProtectionFacts:
    """What was done to keep a network usable in 8 bits.

    `structures` are nodes in float because of their form, `layers` those that measuring found. `methods` count the
    tensors by the calibration method that was chosen for them, if the configured one was not kept for all.
    `float_mac_share` is the share of multiply-accumulates that are not in 8 bits, and `extra_weight_bytes` what their
    weights add to the file. `before` and `after` are verdicts with the part that decides them; `tried` has every trial,
    and `alternatives` the wider presets that were measured to be ok, if 8 bits are not.
    """

    structures: tuple[str, ...] = ()
    layers: tuple[ProtectedLayer, ...] = ()
    is_float_between_products: bool = False
    methods: Mapping[str, int] = field(default_factory=dict)
    float_mac_share: float = 0.0
    extra_weight_bytes: int = 0
    before: str = ""
    after: str = ""
    tried: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackingFacts:
    """How many weights are stored at the bit width of their formats, and the bits of each of their numbers."""

    profile: str
    weights: int
    bits_per_weight: float


@dataclass(frozen=True)
class Report:
    """Everything about one run."""

    config_name: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    source: FileFacts
    result: FileFacts | None
    plan: QuantizationPlan
    calibration: CalibrationFacts
    outputs: tuple[OutputFidelity, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    algorithms: tuple[AlgorithmFacts, ...] = ()
    remarks: tuple[str, ...] = ()
    op_types: Mapping[str, str] = field(default_factory=dict)  # operators of all nodes that could be quantized, by name
    mixed: MixedPlan | None = None  # if layers were chosen to have lower types
    protection: ProtectionFacts | None = None  # if something was protected
    packing: PackingFacts | None = None
    measure: MeasureResult | None = None  # the result of the user's metric, if there is one
    chosen_by: str = ""  # the reason for this configuration, if the user named none
    auto: Mapping[str, Any] = field(default_factory=dict)  # the trials of `--config auto`, as JSON
    device: str = "cpu"  # the device that both networks ran on
    card: Mapping[str, Any] = field(default_factory=dict)  # how to rebuild the file: a quark.card.Card as JSON

    @property
    def verdict(self) -> Verdict:
        return overall_verdict(self.outputs)

    @property
    def quantized_nodes(self) -> tuple[str, ...]:
        """The nodes that take part in quantization: all but the skipped ones."""
        skipped = {entry.node for entry in self.plan.skipped}
        return tuple(name for name in self.op_types if name not in skipped)

    def formats(self, role: Role) -> dict[str, int]:
        """Return the number of tensors of a role by format, with per-channel and per-tensor formats apart."""
        return dict(Counter(str(entry.choice) for entry in self.plan if entry.role is role))

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        content = {
            "verdict": self.verdict.value,
            "outputs": [output.to_dict() for output in self.outputs],
            "measure": self.measure.to_dict() if self.measure else None,
            "source": asdict(self.source),
            "result": asdict(self.result) if self.result else None,
            "config_name": self.config_name,
            "chosen_by": self.chosen_by,
            "config": dict(self.config),
            "versions": dict(self.versions),
            "device": self.device,
            "calibration": asdict(self.calibration),
            "rewrites": [asdict(rewrite) for rewrite in self.rewrites],
            "algorithms": [asdict(algorithm) for algorithm in self.algorithms],
            "mixed_precision": self.mixed.to_dict() if self.mixed else None,
            "protection": asdict(self.protection) if self.protection else None,
            "remarks": list(self.remarks),
            "quantized_nodes": [
                {"node": name, "op_type": self.op_types.get(name, "")} for name in self.quantized_nodes
            ],
            "packing": asdict(self.packing) if self.packing else None,
            "auto": dict(self.auto) or None,
            "card": dict(self.card) or None,
            "plan_sha256": self.plan.digest,
            "plan": self.plan.to_dict(),
        }
        return indented_json(content)
