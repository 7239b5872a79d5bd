"""`mnnsmith canvas`: a picture as the one image that an app which sends text alone can show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli.console import clean, note, say, say_json
from mnnsmith.cli.media import require_reader
from mnnsmith.errors import MissingResourceError, SourceError

if TYPE_CHECKING:
    from mnnsmith.session_media import MediaReader
    from mnnsmith.vision.settings import U8

Image = Annotated[Path, typer.Argument(metavar="IMAGE", help="A picture.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The PNG to write.")]
Model = Annotated[
    Path,
    typer.Option(
        "--bundle", metavar="DIR",
        help="Whose pictures: a bundle, or a model's folder with preprocessor_config.json.",
    ),
]  # fmt: skip


def canvas(image: Image, output: Output, bundle: Model, json_output: o.Json = False) -> None:
    """Write a picture as its tiles in one image, and show the line of a prompt that names it.

    For bundles of the canvas profile; docs/vision.md says what an app does with both.
    """
    from mnnsmith.vision.canvas import make_canvas

    picture = _reader(bundle).picture(image)
    for text in picture.notes:
        note(f"({text})")
    pixels = make_canvas(picture)
    _write(output, pixels)
    height, width = pixels.shape[:2]
    line = f"<img><hw>{height},{width}</hw>{output.name}</img>"
    if json_output:
        say_json({
            "canvas": str(output), "height": height, "width": width, "rows": picture.rows,
            "cols": picture.cols, "prompt": line,
        })  # fmt: skip
    else:
        say(clean(line, sys.stdout))


def _reader(folder: Path) -> MediaReader:
    """What a bundle, or a checkpoint's folder, says of pictures."""
    from mnnsmith.bundle import open_bundle
    from mnnsmith.files import read_json_object, user_path
    from mnnsmith.session_media import MediaReader, read_media_of

    found = user_path(folder)
    names = ("preprocessor_config.json", "processor_config.json")
    files = [found / name for name in names if (found / name).is_file()]
    if files:
        return MediaReader({file.name: read_json_object(file) for file in files}, str(found))
    if not (found / "mnnsmith.json").is_file():
        raise SourceError(
            f"{found}: neither a bundle nor a folder with preprocessor_config.json.",
            "Give the bundle that the app uses, or the model that it was converted from.",
        )
    # What is written is for another machine; here the weights are of no matter.
    return require_reader(read_media_of(open_bundle(found, whole=False)))


def _write(path: Path, pixels: U8) -> None:
    from PIL import Image as Pillow

    try:
        Pillow.fromarray(pixels).save(path.expanduser(), "PNG")
    except OSError as error:
        raise MissingResourceError(
            f"{path}: cannot be written: {error.strerror or error}.", "Choose another output."
        ) from error
