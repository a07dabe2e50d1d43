"""Write docs/api/*.md, docs/cli.md, docs/options.md and docs/support_matrix.md from the code.

python -m tools.reference            writes them
python -m tools.reference --check    exit 1 when one of them is not what the code says
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.reference.api import api_pages
from tools.reference.commands import command_reference
from tools.reference.options import options_document
from tools.reference.support import support_matrix

COMMAND = "python -m tools.reference"
DOCS = Path("docs")


def documents() -> Mapping[Path, str]:
    """Every generated document by its path in the checkout."""
    api = {DOCS / "api" / name: text for name, text in api_pages(COMMAND)}
    return {
        **api,
        DOCS / "cli.md": command_reference(COMMAND),
        DOCS / "options.md": options_document(COMMAND),
        DOCS / "support_matrix.md": support_matrix(COMMAND),
    }


def stale(root: Path) -> list[Path]:
    """The documents that are not what the code says, and pages of docs/api that nothing writes."""
    wanted = documents()
    wrong = [file for file, text in wanted.items() if not _is_text(root / file, text)]
    left = {path.relative_to(root) for path in (root / DOCS / "api").glob("*.md")} - set(wanted)
    return [*wrong, *sorted(left)]


def write(root: Path) -> None:
    """Write all of them; pages of docs/api that nothing writes any more are left for git to remove."""
    for file, text in documents().items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text, encoding="utf-8")


def _is_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def main(arguments: list[str] | None = None) -> int:
    """Write the reference, or compare it with --check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--root", type=Path, default=Path("."), help="the checkout (default: the working folder)")
    options = parser.parse_args(arguments)
    if not options.check:
        write(options.root)
        return 0
    wrong = stale(options.root)
    for file in wrong:
        sys.stderr.write(f"{file} is not what the code says; run {COMMAND}\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
