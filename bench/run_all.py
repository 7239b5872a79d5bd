"""Measure everything and rewrite the tables of docs/performance.md, vision.md and deepseek.md.

`python bench/run_all.py --write-docs` runs every benchmark, beside the alternatives that
`bench/make_peers.py` has set up (those that are not there are left out), and puts the tables with
their provenance into the documents.  --only NAME measures a part; --only with no name measures
nothing and rewrites the tables from bench/results.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from common import BENCH, RESULTS, ROOT, WORK, note, provenance_line
from make_peers import peers

# Page -> script -> (its options, the peers it compares with).
PAGES: dict[str, dict[str, tuple[list[str], tuple[str, ...]]]] = {
    "performance.md": {
        "convert_speed": (["--repeats", "3"], ("upstream", "upstream-python")),
        "scaling": (["--repeats", "1", "--clean"], ()),
        "speed": ([], ("upstream", "upstream-python", "llamacpp-python")),
        "quality": ([], ()),
        "deepseek_scale": (["--repeats", "1"], ()),
        "verify_speed": ([], ()),
        "verify_memory": (["--repeats", "1", "--clean"], ()),
    },
    "vision.md": {"vision": ([], ())},
    "deepseek.md": {"mla_forms": (["--repeats", "3"], ()), "phone_table": ([], ())},
}
SCRIPTS = {name: run for scripts in PAGES.values() for name, run in scripts.items()}
_PLACE = "<!-- table {name} -->\n.*?<!-- end -->"


def run(name: str, work: Path) -> None:
    """Run one script; its result file is replaced when it ends well."""
    options, wanted = SCRIPTS[name]
    found = peers(work)
    given = [f"--{peer}={found[peer]}" for peer in wanted if found[peer].exists()]
    for peer in wanted:
        if not found[peer].exists():
            note(f"{name}: {found[peer]} is not there; measured without it (see make_peers.py)")
    command = [sys.executable, BENCH / f"{name}.py", f"--work={work}", *options, *given]
    subprocess.run(command, check=True)


def write_tables(document: Path, names: Iterable[str], results: Path) -> None:
    """Put the table of every result file in its place in the document."""
    text = document.read_text(encoding="utf-8")
    for name in names:
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        body = f"{data['table']}\n\n{provenance_line(data['provenance'])}"
        block = f"<!-- table {name} -->\n{body}\n<!-- end -->"
        text, count = re.subn(
            _PLACE.format(name=name), block.replace("\\", r"\\"), text, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"{document}: found {count} places for the table {name}, expected one")
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="folder for models and bundles")
    parser.add_argument("--only", nargs="*", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--write-docs", action="store_true", help="rewrite the tables of docs")
    chosen = parser.parse_args()
    for script in chosen.only:
        run(script, chosen.work.resolve())
    if chosen.write_docs:
        for page, scripts in PAGES.items():
            write_tables(ROOT / "docs" / page, scripts, RESULTS)
