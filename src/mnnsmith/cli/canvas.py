"""`mnnsmith canvas`: a picture as the one image that an app which sends text alone can show."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli.console import clean, note, say, say_json
from mnnsmith.cli.media import require_reader
from mnnsmith.errors import BundleError, MissingResourceError, SourceError, UsageError

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
    from mnnsmith.session_media import check_grid
    from mnnsmith.vision.canvas import make_canvas

    reader, lengths = _reader(bundle)
    picture = reader.picture(image)
    if lengths is not None:
        check_grid(picture, lengths)
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


def _reader(folder: Path) -> tuple[MediaReader, Sequence[Sequence[int]] | None]:
    """What a bundle, or a checkpoint's folder, says of pictures; a bundle has `canvas_tokens`."""
    from mnnsmith.bundle import open_bundle
    from mnnsmith.engine.runner import RefusedError, vision_of
    from mnnsmith.files import read_json_object, user_path
    from mnnsmith.session_media import MediaReader, read_media_of

    found = user_path(folder)
    names = ("preprocessor_config.json", "processor_config.json")
    files = [found / name for name in names if (found / name).is_file()]
    if files:
        return MediaReader({f.name: read_json_object(f) for f in files}, str(found)), None
    if not (found / "mnnsmith.json").is_file():
        raise SourceError(
            f"{found}: neither a bundle nor a folder with preprocessor_config.json.",
            "Give the bundle that the app uses, or the model that it was converted from.",
        )
    # What is written is for another machine; here the weights are of no matter.
    opened = open_bundle(found, whole=False)
    reader = require_reader(read_media_of(opened))
    try:
        vision = vision_of(str(found), read_json_object(found / "llm_config.json"))
    except RefusedError as error:
        raise BundleError(str(error), "Convert the model again.") from error
    if vision is None or vision.canvas_tokens is None:
        raise UsageError(
            f"{found}: this bundle takes tiles, not whole pictures.",
            "The app's bundle must be one of `mnnsmith convert --vision canvas`.",
        )
    return reader, vision.canvas_tokens


def _write(path: Path, pixels: U8) -> None:
    from PIL import Image as Pillow

    try:
        Pillow.fromarray(pixels).save(path.expanduser(), "PNG")
    except OSError as error:
        raise MissingResourceError(
            f"{path}: cannot be written: {error.strerror or error}.", "Choose another output."
        ) from error
