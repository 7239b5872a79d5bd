"""`mnnsmith report`: verifications as one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mnnsmith.cli.console import note
from mnnsmith.errors import UsageError

if TYPE_CHECKING:
    from mnnsmith.verify.results import Verification

Verified = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...",
        help="Verified bundles, or results that verify wrote as JSON, side by side.",
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")]


def report(verified: Verified, output: Output = Path("report.html")) -> None:
    """Show verifications on one page of HTML that needs nothing else."""
    from mnnsmith import api
    from mnnsmith.files import output_file, replace_text, user_path

    target = output_file(output)
    place = target.resolve()
    read = {user_path(path).resolve() for path in verified}
    # An older page may lie within a bundle; nothing else there may be replaced.
    if place in read or (place.parent in read and place.exists() and place.suffix != ".html"):
        raise UsageError(f"{target}: is to be read.", "Give another output.")
    replace_text(target, api.report_page([_read(path) for path in verified]))
    note(f"wrote {target}")


def _read(path: Path) -> Verification:
    from mnnsmith import api
    from mnnsmith.files import is_file, user_path

    if is_file(user_path(path)):
        return api.read_verification(path)
    return api.recorded_verification(api.open_bundle(path))
