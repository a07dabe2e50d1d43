"""Why compiled code does not load, told from the words of the loader.

The same few causes hide behind the messages of Python packages and of our own library, on every system: another
processor, an older system, a folder that nothing may be run from, a package built for another numpy or protobuf.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """A cause, and the remedy for the package `{name}`."""

    pattern: str
    cause: str
    remedy: str


TROUBLES = (
    Trouble(
        r"gencode|Descriptors cannot be created|protobuf",
        "its protobuf is another version than it was built with",
        "pip install --upgrade {name} protobuf",
    ),
    Trouble(
        r"compiled using NumPy|numpy\.(_?core)\.multiarray|_ARRAY_API|numpy\.dtype size changed",
        "it was built for another version of numpy",
        "pip install --upgrade --force-reinstall --no-cache-dir {name}",
    ),
    Trouble(
        r"GLIBC(XX)?_|CXXABI_",
        "it was compiled for a newer system than this one",
        "install the wheel for this system: pip install --force-reinstall --only-binary :all: {name}",
    ),
    Trouble(
        r"failed to map segment|Operation not permitted",
        "it lies on a file system that nothing may be run from (noexec)",
        "create the virtual environment in another folder, and install there",
    ),
    Trouble(
        r"wrong ELF class|invalid ELF header|file too short|[Ii]ncompatible architecture|not a valid Win32|Exec format",
        "it is for another processor or system, or was not copied whole",
        "pip install --force-reinstall --no-cache-dir {name}",
    ),
    Trouble(
        r"libstdc\+\+|libgcc_s",
        "the C++ library of the system is missing",
        "apt-get install libstdc++6, or what your distribution calls it",
    ),
    Trouble(
        r"cannot open shared object file|DLL load failed|Library not loaded",
        "a library that it needs is missing",
        "install the library that the message names, or pip install --force-reinstall {name}",
    ),
)


def explain(error: BaseException, name: str) -> tuple[str, str]:
    """What happened and what to do, for an exception at loading the package of that name."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    for trouble in TROUBLES:
        if re.search(trouble.pattern, message):
            return f"{trouble.cause} ({message})", trouble.remedy.format(name=name)
    return message, f"pip install --force-reinstall --no-cache-dir {name}"
