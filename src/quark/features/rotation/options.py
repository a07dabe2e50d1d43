"""The options of rotation, and the file that names the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quark.errors import InvalidValueError
from quark.features.feature import Feature
from quark.files.foreign import Fields, read_json

FEATURE = Feature("rotation", nouns={"rotation": "node"})
LARGEST = 1 << 16
USUAL_SIZE = 4096  # the size of the matrices in a pairs file, if it does not say


@dataclass(frozen=True)
class RotatedPair:
    """A place of the network that is rotated, by names of nodes: `writers` compute it, `readers` read it, behind `norm`
    if there is one."""

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    norm: str | None = None


@dataclass(frozen=True)
class RotationOptions:
    """Which rotations are made.

    r1   the residual stream, folded into the weights that write and read it. With `is_online`, the inputs of the layers
         that read it are rotated at inference instead.
    r2   the values of attention, head by head, folded into two weights; None: unless there are pairs
    r3   queries and keys, at inference
    r4   the inputs of the down projections, at inference

    `pairs` of the file `source` say what r1 rotates; without them, residual streams are found in the graph. `size` is
    the number of channels of the stream; None: any. With a `block`, r1 and r4 rotate every block of that many channels
    separately. A random rotation has random signs, from a fixed seed.
    """

    pairs: tuple[RotatedPair, ...] = ()
    size: int | None = None
    is_random: bool = False
    source: str = ""
    r1: bool = True
    r2: bool | None = None
    r3: bool = False
    r4: bool = False
    block: int | None = None
    is_online: bool = False

    def __post_init__(self) -> None:
        for name, value in (("RMatrixDim", self.size), ("RotationSize", self.block)):
            if value is not None and not 2 <= value <= LARGEST:
                raise InvalidValueError(f"{name} = {value}: expected an integer from 2 to {LARGEST}")
        if self.is_online and (self.pairs or not self.r1):
            raise InvalidValueError(
                "OnlineR1Rotation: it rotates the inputs of all layers that read the residual stream; set R1 and leave "
                "RConfigPath out"
            )
        if not (self.r1 or self.has_r2 or self.r3 or self.r4):
            raise InvalidValueError("include_rotation: R1, R2, R3 and R4 are all False; set one of them")

    @property
    def has_r2(self) -> bool:
        return not self.pairs if self.r2 is None else self.r2


def read_pairs(path: str | Path) -> tuple[RotatedPair, ...]:
    """The pairs of a JSON file: {"R1_pairs": [{"prev_nodes": [...], "norm_node": "...", "next_nodes": [...]}]}."""
    label = f"rotation config '{path}'"
    content = read_json(path, label)
    entries = Fields(content, label).value("R1_pairs")
    if not isinstance(entries, list) or not entries:
        raise InvalidValueError(f"{label}: field 'R1_pairs' has no pairs: expected a list of mappings with prev_nodes")
    pairs = []
    for number, entry in enumerate(entries):
        fields = Fields(entry, label, f"R1_pairs[{number}]")
        names = {}
        for key in ("prev_nodes", "next_nodes"):
            value = fields.content.get(key, [])
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                fields.refuse(key, "a list of names of nodes")
            names[key] = tuple(value)
        norm = fields.text("norm_node") if fields.has("norm_node") else None
        if norm == "":
            fields.refuse("norm_node", "the name of a node")
        pairs.append(RotatedPair(names["prev_nodes"], names["next_nodes"], norm))
    return tuple(pairs)


@dataclass(frozen=True)
class NormGroup:
    """A normalization of a language model between the layers that write what it reads and those that read its result,
    by names in which layer_id and pre_layer_id stand for numbers. `targets` are the layers that an online rotation is
    for; None: those behind the normalization."""

    writers: tuple[str, ...] = ()
    norm: str = ""
    readers: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None

    def of_layer(self, index: int) -> NormGroup:
        """The group of one layer."""

        def named(name: str) -> str:
            return name.replace("pre_layer_id", str(index - 1)).replace("layer_id", str(index))

        targets = None if self.targets is None else tuple(map(named, self.targets))
        return NormGroup(tuple(map(named, self.writers)), named(self.norm), tuple(map(named, self.readers)), targets)


@dataclass(frozen=True)
class LanguageRotationOptions:
    """Which rotations are made in a language model; see RotationOptions.

    `first`, `middle` and `last` are the groups of the first layer, of all others, and behind the last one. Without
    them, they are found in the model. The names at the end are paths of modules, those behind `layers` in a layer; what
    is empty is found. `attention` and `feed_forward` may have wildcards.
    """

    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    block: int | None = None
    is_online: bool = False
    is_random: bool = False  # r1
    is_random_r2: bool = False
    first: tuple[NormGroup, ...] = ()
    middle: tuple[NormGroup, ...] = ()
    last: tuple[NormGroup, ...] = ()
    backbone: str = ""
    layers: str = ""
    values: str = ""
    outputs: str = ""
    attention: str = ""
    feed_forward: str = ""

    def __post_init__(self) -> None:
        if self.block is not None and not 2 <= self.block <= LARGEST:
            raise InvalidValueError(f"rotation_size = {self.block}: expected an integer from 2 to {LARGEST}")
        if not (self.r1 or self.r2 or self.r3 or self.r4):
            raise InvalidValueError("algorithm 'rotation': r1, r2, r3 and r4 are all False; set one of them")

    @property
    def has_groups(self) -> bool:
        """True if the user named the layers."""
        return bool(self.first or self.middle or self.last)

    def groups(self, count: int) -> list[NormGroup]:
        """The named groups of all layers."""
        groups = [group.of_layer(0) for group in self.first]
        groups += [group.of_layer(index) for index in range(1, count) for group in self.middle]
        return groups + [group.of_layer(count - 1) for group in self.last]
