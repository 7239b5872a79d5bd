"""A picture from a path, bytes, a Pillow image or an array, as upright RGB.

Everything here may come from a stranger: size, format and number of scans are checked before a
pixel is decoded, and whatever is wrong with a picture is one `SourceError`.  Pillow's warnings are
not shown.

Colors are those of transformers 5 (`convert_to_rgb`: transparent pixels on white), with these
differences, each where its result is not the picture that a person sees:

- The EXIF orientation counts however a picture comes in; there, only for a path or URL.
- Transparency counts however a picture comes in; there, a path or URL loses it.
- 16-bit gray is scaled to 8 bits; there, everything above 255 is white.
- Integer and floating-point gray of more bits must have a known range: 0..255, 0..65535 or 0..1.
"""

from __future__ import annotations

import os
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import MissingResourceError, SourceError, UsageError
from mnnsmith.files import is_lfs_pointer, lfs_error, read_bytes, user_path
from mnnsmith.vision.settings import U8

if TYPE_CHECKING:
    from PIL import Image

PictureSource: TypeAlias = "str | Path | bytes | Image.Image | npt.NDArray[Any]"

# Where Pillow itself begins to warn of decompression bombs; 360 MB once decoded.
MAX_PIXELS = 89_478_485
MAX_FILE_BYTES = 256 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_FORMAT_NAMES = "PNG, JPEG, WebP, GIF, BMP or TIFF"
# A progressive JPEG has some ten scans, each of which costs a pass over the whole picture.
_MAX_SCANS = 128
_SCAN_MARKER = b"\xff\xda"
_BAND_PIXELS = 1 << 20
_ORIENTATION_TAG = 0x0112
# What Pillow's decoders raise for damaged files, besides its own UnidentifiedImageError (OSError).
_DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
# Filters of warnings belong to the process.
_WARNINGS_LOCK = threading.RLock()


@dataclass(frozen=True)
class Loaded:
    """A picture, decoded.

    image: RGB and upright; a given image itself, where it is that already.
    notes: what a person may want to know.
    """

    image: Image.Image
    notes: tuple[str, ...] = ()


def load_picture(source: PictureSource, name: str | None = None) -> Loaded:
    """A picture as upright RGB.

    source: a path; a file's bytes; a Pillow image (not changed, but decoded if it was not yet); or
    an array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] of red, green, blue and alpha: uint8, bool,
    uint16 (0..65535), or floats from 0 to 1.
    name: what messages call it, the path by default.

    Raises SourceError for a file that is missing, damaged, too large or no picture, UsageError for
    an array or object that is none, MissingResourceError without Pillow.
    """
    image_type = _pillow_image_type()
    if isinstance(source, (str, Path)):
        path = user_path(source)
        where = name or str(path)
        return _from_bytes(read_bytes(path, MAX_FILE_BYTES), where)
    where = name or "the picture"
    if isinstance(source, bytes):
        return _from_bytes(source, where)
    if isinstance(source, np.ndarray):
        return _from_array(source, where)
    if isinstance(source, image_type):
        with _quiet_pillow(where):
            return _upright_rgb(source, where, encoded=None)
    raise UsageError(
        f"{where}: a {type(source).__name__} is no picture.",
        "Give a path, a file's bytes, a Pillow image or a numpy array.",
    )


def _pillow_image_type() -> type[Image.Image]:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingResourceError(
            "Pictures need Pillow, which is not installed.",
            "Install it with `pip install 'mnnsmith[vision]'`.",
        ) from error
    return Image.Image


@contextmanager
def _quiet_pillow(where: str) -> Iterator[None]:
    """No warnings; whatever a decoder raises becomes a SourceError."""
    from PIL import Image

    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Pillow only warns, and decodes, up to twice its limit.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            yield
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise SourceError(
                f"{where}: a decompression bomb, or far too large: more than {MAX_PIXELS} pixels.",
                "Scale it down first.",
            ) from error
        except _DAMAGE as error:
            shown = " ".join(str(error).split()) or type(error).__name__
            raise SourceError(
                f"{where}: the picture is damaged or cut off: {shown:.200}.",
                "Open it in a viewer; if that works, save it again as PNG or JPEG.",
            ) from error


@contextmanager
def _quiet_libtiff(image: Image.Image) -> Iterator[None]:
    """Libtiff writes what it finds wrong straight to the process's standard error."""
    if image.format != "TIFF":
        yield
        return
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _from_bytes(data: bytes, where: str) -> Loaded:
    if not data:
        raise SourceError(f"{where}: the file is empty.")
    if is_lfs_pointer(data[:64]):
        raise lfs_error(Path(where))
    from PIL import Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

    # Imported for what they register: Pillow does not load these two by itself.
    assert TiffImagePlugin.TiffImageFile.format and WebPImagePlugin.WebPImageFile.format
    with _quiet_pillow(where):
        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise SourceError(
                f"{where}: not a picture in a format that is read: {_FORMAT_NAMES}.",
                "Its content counts, not the ending of its name; save it as PNG or JPEG.",
            ) from None
        with image:
            return _upright_rgb(image, where, encoded=data)


def _upright_rgb(image: Image.Image, where: str, encoded: bytes | None) -> Loaded:
    _check_size(image.width, image.height, where)
    is_jpeg = image.format in ("JPEG", "MPO")
    if is_jpeg and encoded is not None and encoded.count(_SCAN_MARKER) > _MAX_SCANS:
        raise SourceError(
            f"{where}: a JPEG with more than {_MAX_SCANS} scans, made to take long to decode."
        )
    notes: list[str] = []
    # The second picture of a JPEG (MPO) is a preview or another view, not a film.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        notes.append(f"{where}: several pictures or frames in one file; the first is taken")
    with _quiet_libtiff(image):
        image.load()
    _check_size(image.width, image.height, where)
    orientation, note = _orientation(image, where)
    if note is not None:
        notes.append(note)
    rgb = _rgb(image, where)
    return Loaded(_turned(rgb, orientation), tuple(notes))


def _check_size(width: int, height: int, where: str) -> None:
    if width < 1 or height < 1:
        raise SourceError(f"{where}: the picture has no pixels ({width} x {height}).")
    if width * height > MAX_PIXELS:
        raise SourceError(
            f"{where}: {width} x {height} pixels are more than the {MAX_PIXELS} we accept.",
            "Scale it down first.",
        )


def _orientation(image: Image.Image, where: str) -> tuple[int, str | None]:
    """The EXIF (or XMP) orientation 1..8, and a note where it turns the picture or is damaged."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except _DAMAGE:
        return 1, f"{where}: its EXIF data are damaged; it is taken as it lies"
    if type(value) is not int or not 2 <= value <= 8:
        return 1, None
    return value, f"{where}: turned upright, as its EXIF orientation ({value}) says"


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    from PIL.Image import Transpose

    methods = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    method = methods.get(orientation)
    return image if method is None else image.transpose(method)


def _rgb(image: Image.Image, where: str) -> Image.Image:
    from PIL import Image as Pillow

    if image.mode.startswith("I") or image.mode == "F":
        return _gray_of_many_bits(image, where)
    if not ("A" in image.getbands() or "a" in image.getbands() or _has_key(image)):
        # A copy of an image that is RGB already would be another 360 MB.
        return image if image.mode == "RGB" else image.convert("RGB")
    # Band by band, because three whole copies of a large picture would not fit.
    result = Pillow.new("RGB", image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        # The transparent color is in the info, which a crop keeps.
        band = band.convert("RGBA")
        white = Pillow.new("RGBA", band.size, (255, 255, 255, 255))
        result.paste(Pillow.alpha_composite(white, band).convert("RGB"), (0, top))
    return result


def _has_key(image: Image.Image) -> bool:
    return image.info.get("transparency") is not None


def _gray_of_many_bits(image: Image.Image, where: str) -> Image.Image:
    """Modes I;16, I and F, which Pillow would cut off at 255."""
    from PIL import Image as Pillow

    values = np.asarray(image)
    level = _eight_bits(values, where)
    key = image.info.get("transparency")
    if isinstance(key, int):
        level = np.where(values == key, np.uint8(255), level)
    return Pillow.fromarray(level).convert("RGB")


def _eight_bits(values: npt.NDArray[Any], where: str) -> U8:
    """Levels 0..255 out of any type whose range is known; 16 bits are rounded, not cut."""
    if values.dtype == np.uint8:
        return np.asarray(values, np.uint8)
    if values.dtype == np.bool_:
        white_or_black: U8 = np.where(values, np.uint8(255), np.uint8(0))
        return white_or_black
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        return _from_16_bits(values)
    low, high = float(values.min()), float(values.max())
    if values.dtype.kind == "f" and low >= 0 and high <= 1:
        return np.asarray(np.rint(values * np.float32(255)), np.uint8)
    if low >= 0 and high <= 65535 and bool((values == np.rint(values)).all()):
        return values.astype(np.uint8) if high <= 255 else _from_16_bits(values)
    raise UsageError(
        f"{where}: {values.dtype} values from {low:g} to {high:g} have no known meaning as levels.",
        "Give whole numbers 0..255 or 0..65535, or floats from 0 to 1.",
    )


def _from_16_bits(values: npt.NDArray[Any]) -> U8:
    # By a table, because arithmetic would take several copies in 32 bits.
    table = ((np.arange(1 << 16) + 128) // 257).astype(np.uint8)
    level: U8 = table[values if values.dtype.kind in "iu" else values.astype(np.uint16)]
    return level


def _from_array(values: npt.NDArray[Any], where: str) -> Loaded:
    from PIL import Image as Pillow

    shape = values.shape
    if not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))):
        raise UsageError(
            f"{where}: an array of shape {list(shape)} is no picture.",
            "Give [height, width] or [height, width, 1, 3 or 4]; channels come last.",
        )
    if values.dtype.kind not in "buif":
        raise UsageError(f"{where}: an array of {values.dtype} holds no levels.")
    _check_size(shape[1], shape[0], where)
    level = _eight_bits(values, where)
    if len(shape) == 3 and shape[2] == 1:
        level = level[:, :, 0]
    return Loaded(_rgb(Pillow.fromarray(np.ascontiguousarray(level)), where))
