"""What a checkpoint's processor files say about pictures and videos, checked.

The keys are those of transformers' `Idefics3ImageProcessor`, `SmolVLMImageProcessor` and
`SmolVLMVideoProcessor`; a key that is not there has the default of those classes, and one that they
do not read is ignored, as they do.  A value that would change what our processor does and is none
of those it knows is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import SourceError, UnsupportedError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Files = Mapping[str, Mapping[str, Any]]

# A tile larger than this is no tile; also the largest side transformers resizes a picture to.
MAX_SIDE = 4096
_DEFAULT_TILE = 364
_DEFAULT_SEQ_LEN = 169
_MAX_SEQ_LEN = 65536
_MAX_FRAMES = 4096
# One picture or video of a real model takes some thousand tokens.
_MAX_TOKENS = 1 << 20
_SUFFIXES = ("", "Fast", "Pil")
_PICTURE_TYPES = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
_VIDEO_TYPE = "SmolVLMVideoProcessor"


@dataclass(frozen=True)
class Levels:
    """How levels 0..255 become the numbers a vision tower takes.

    A value is `(level * rescale_factor - mean) / std`, a channel (red, green, blue) each.
    """

    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def pixel_values(self, tiles: U8) -> F32:
        """float32 [n, 3, S, S] out of uint8 [n, S, S, 3], to the bit as transformers computes it.

        transformers multiplies in double precision, rounds to single, and normalizes in single.
        """
        values = (tiles.astype(np.float64) * self.rescale_factor).astype(np.float32)
        values -= np.array(self.mean, np.float32)
        values /= np.array(self.std, np.float32)
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2))

    @property
    def engine_mean(self) -> tuple[float, ...]:
        """The engine's `image_mean`: a value is `(level - image_mean) * image_norm`."""
        return tuple(mean / self.rescale_factor for mean in self.mean)

    @property
    def engine_norm(self) -> tuple[float, ...]:
        """The engine's `image_norm`."""
        return tuple(self.rescale_factor / std for std in self.std)


@dataclass(frozen=True)
class PictureSettings:
    """How a picture becomes tiles.

    longest_edge: pixels that its longer side is brought to first; tile: pixels of a tile's side;
    resample: Pillow's number of the filter (1 is LANCZOS); split: into tiles, or squashed to one;
    image_seq_len: `<image>` tokens a tile.
    """

    longest_edge: int
    tile: int
    resample: int
    split: bool
    levels: Levels
    image_seq_len: int


@dataclass(frozen=True)
class VideoSettings:
    """How a video becomes frames: at most `max_frames` of them, `fps` a second.

    longest_edge, tile, resample: a frame is resized twice, as a picture that is not split.
    """

    fps: float
    max_frames: int
    longest_edge: int
    tile: int
    resample: int
    levels: Levels
    image_seq_len: int


def read_picture_settings(files: Files, origin: str) -> PictureSettings:
    """The settings in `preprocessor_config.json` and `processor_config.json`.

    files: parsed files by name; origin: where they are from, for messages.

    Raises SourceError for values that make no sense, UnsupportedError for another processor.
    """
    nested = _files_part(files, origin, "processor_config.json", "image_processor")
    found = nested if nested is not None else files.get("preprocessor_config.json")
    if found is None:
        raise SourceError(
            f"{origin}: there is no preprocessor_config.json, so how the model takes pictures is "
            "not known.",
            "Fetch it, and processor_config.json, from where the model is from.",
        )
    keys = _Keys(found, f"{origin}: the picture processor's")
    keys.check_type("image_processor_type", _PICTURE_TYPES)
    keys.refuse_unless("do_resize", True)
    keys.refuse_unless("do_convert_rgb", True)
    settings = PictureSettings(
        longest_edge=keys.edge("size", 4 * _DEFAULT_TILE),
        tile=keys.edge("max_image_size", _DEFAULT_TILE, MAX_SIDE),
        resample=keys.whole("resample", 1, 0, 5),
        split=keys.flag("do_image_splitting", True),
        levels=keys.levels(),
        image_seq_len=_image_seq_len(files, origin),
    )
    side = math.ceil(min(settings.longest_edge, MAX_SIDE) / settings.tile)
    _check_tokens(side * side if settings.split else 1, settings.image_seq_len, origin)
    return settings


def read_video_settings(files: Files, origin: str) -> VideoSettings | None:
    """The settings for videos, or None where the processor's files do not speak of them.

    Raises as `read_picture_settings`.
    """
    found = _files_part(files, origin, "processor_config.json", "video_processor")
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        found = files.get(name) if found is None else found
    if found is None:
        return None
    keys = _Keys(found, f"{origin}: the video processor's")
    sampling = keys.part("video_sampling")
    if sampling is None and not {"fps", "num_frames"} <= found.keys():
        return None
    keys.check_type("video_processor_type", (_VIDEO_TYPE,))
    keys.refuse_unless("do_resize", True)
    if sampling is None:
        longest_edge = keys.edge("size", 4 * _DEFAULT_TILE)
        fps, max_frames = keys.real("fps"), keys.whole("num_frames", None, 1, _MAX_FRAMES)
    else:
        # Where both say a size, the one for pictures holds: so it is in transformers.
        sizes = keys if "size" in found else sampling
        longest_edge = sizes.edge("size" if "size" in found else "video_size", None)
        fps, max_frames = sampling.real("fps"), sampling.whole("max_frames", None, 1, _MAX_FRAMES)
    settings = VideoSettings(
        fps=fps,
        max_frames=max_frames,
        longest_edge=longest_edge,
        tile=keys.edge("max_image_size", _DEFAULT_TILE, MAX_SIDE),
        resample=keys.whole("resample", 1, 0, 5),
        levels=keys.levels(),
        image_seq_len=_image_seq_len(files, origin),
    )
    _check_tokens(settings.max_frames, settings.image_seq_len, origin)
    return settings


def _check_tokens(tiles: int, image_seq_len: int, origin: str) -> None:
    if tiles * image_seq_len > _MAX_TOKENS:
        raise SourceError(
            f"{origin}: by the processor's files a picture or video could have {tiles} tiles of "
            f"{image_seq_len} tokens, more than the {_MAX_TOKENS} tokens we accept."
        )


def _image_seq_len(files: Files, origin: str) -> int:
    keys = _Keys(files.get("processor_config.json", {}), f"{origin}: the processor's")
    return keys.whole("image_seq_len", _DEFAULT_SEQ_LEN, 1, _MAX_SEQ_LEN)


def _files_part(files: Files, origin: str, name: str, key: str) -> Mapping[str, Any] | None:
    part = _Keys(files.get(name, {}), f"{origin}: {name}:").part(key)
    return None if part is None else part.values


@dataclass(frozen=True)
class _Keys:
    """The keys of one object, read with the checks that an untrusted file needs."""

    values: Mapping[str, Any]
    where: str

    def part(self, name: str) -> _Keys | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad(name, value, "an object")
        return _Keys(value, f"{self.where} {name}:")

    def check_type(self, name: str, known: tuple[str, ...]) -> None:
        value = self.values.get(name)
        if value is not None and value not in {k + suffix for k in known for suffix in _SUFFIXES}:
            raise UnsupportedError(
                f"{self.where} {name} is {value!r:.80}; those known are {', '.join(known)}."
            )

    def refuse_unless(self, name: str, only: bool) -> None:
        if self.flag(name, only) is not only:
            raise UnsupportedError(f"{self.where} {name} is {not only}, which is not supported.")

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.bad(name, value, "true or false")
        return value

    def whole(self, name: str, default: int | None, low: int, high: int) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(name, value, f"a whole number from {low} to {high}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if type(value) not in (int, float) or not 1e-9 <= value <= 1e9:
            raise self.bad(name, value, "a positive number")
        return float(value)

    def edge(self, name: str, default: int | None, high: int = 4 * MAX_SIDE) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, Mapping) or set(value) != {"longest_edge"}:
            raise self.bad(name, value, 'an object with "longest_edge"')
        return _Keys(value, f"{self.where} {name}:").whole("longest_edge", None, 1, high)

    def levels(self) -> Levels:
        """The three steps, each of which a file can switch off."""
        rescale = self.flag("do_rescale", True)
        normalize = self.flag("do_normalize", True)
        return Levels(
            rescale_factor=self.real("rescale_factor", 1 / 255) if rescale else 1.0,
            mean=self._channels("image_mean", low=-1e6) if normalize else (0.0, 0.0, 0.0),
            std=self._channels("image_std", low=1e-9) if normalize else (1.0, 1.0, 1.0),
        )

    def _channels(self, name: str, low: float) -> tuple[float, float, float]:
        value = self.values.get(name, 0.5)
        each = value if isinstance(value, list) else [value] * 3
        if len(each) != 3 or not all(type(v) in (int, float) and low <= v <= 1e6 for v in each):
            raise self.bad(name, value, "a number for each of the three channels")
        red, green, blue = (float(v) for v in each)
        return red, green, blue

    def bad(self, name: str, value: object, expected: str) -> SourceError:
        return SourceError(f"{self.where} {name} is {value!r:.80}, expected {expected}.")
