"""Packed files: weights in the bits that their formats have, unpacked while a session is made.

    pack_model, unpack_model           from file to file
    pack_message, unpack_message       in memory
    Profile, profile_of                portable, custom, native
    PackFacts, UnpackFacts             what was done

`docs/packed_files.md` says how the files are made, and what they cost.
"""

from quark.onnx.pack.pack import (
    LeftWeight,
    PackedWeight,
    PackFacts,
    Profile,
    UnpackFacts,
    pack_message,
    pack_model,
    profile_of,
)
from quark.onnx.pack.unpack import unpack_message, unpack_model

__all__ = [
    "LeftWeight",
    "PackFacts",
    "PackedWeight",
    "Profile",
    "UnpackFacts",
    "pack_message",
    "pack_model",
    "profile_of",
    "unpack_message",
    "unpack_model",
]
