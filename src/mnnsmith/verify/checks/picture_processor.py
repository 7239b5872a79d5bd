"""Whether a bundle takes pictures as its original does: settings, tiles, ids around them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.conversion.prepare import Prepared
from mnnsmith.errors import BundleError
from mnnsmith.files import read_json_object
from mnnsmith.mnn.config_files import picture_config
from mnnsmith.verify.checks.tokens import TRANSFORMERS_ERRORS, original_folder
from mnnsmith.verify.context import Context
from mnnsmith.verify.results import Finding
from mnnsmith.verify.texts.picture_prompts import PicturePrompt
from mnnsmith.verify.texts.pictures import Sample
from mnnsmith.vision.settings import F32, U8, PictureSettings

_CONFIG = "llm_config.json"
_AGAIN = "Convert the model again, or copy the bundle again."
# Levels by which a pixel may be off: another version of Pillow may round otherwise.
_MAX_LEVELS = 1.5
_SHOWN = 4
# Of a narrow picture, the axis of channels cannot be told.
_LAST = "channels_last"
Array = npt.NDArray[Any]


def compare_settings(
    context: Context, original: Prepared, files: Mapping[str, Any]
) -> Iterator[Finding]:
    """What the bundle's files say of pictures, against the original's."""
    expected = original.checkpoint.processor
    for name in sorted({*expected, *files}):
        if expected.get(name) != files.get(name):
            text = f"what it keeps of {name} is not the original's"
            keys = _differing(expected.get(name), files.get(name))
            yield Finding("error", "mnnsmith.json", f"{text}{keys}.", _AGAIN)
    facts = original.pictures
    if facts is None:
        raise BundleError("the original takes no pictures.", "Give the model that was converted.")
    config = read_json_object(context.bundle.path / _CONFIG)
    for key, value in picture_config(facts).items():
        if not _equal(config.get(key), value):
            yield Finding(
                "error", _CONFIG, f"{key} is {config.get(key)!r:.80}, expected {value!r:.80}.",
                f"By it the engine takes pictures in. {_AGAIN}",
            )  # fmt: skip


def compare_with_transformers(
    context: Context,
    settings: PictureSettings,
    samples: Sequence[Sample],
    prompts: Sequence[tuple[PicturePrompt, Sequence[Sample]]],
) -> tuple[int, list[Finding]]:
    """Tiles and ids against transformers' own processor, with Pillow, where it is at hand.

    How many pictures and prompts differ, and what is to be said of them.
    """
    folder = original_folder(context)
    if folder is None or importlib.util.find_spec("transformers") is None:
        return 0, [
            Finding("note", "processor", "tiles and ids were compared with no other program: "
                    "transformers, or a folder of the original that it reads, is not there.")
        ]  # fmt: skip
    import transformers

    name = f"transformers {transformers.__version__}"
    findings: list[Finding] = []
    try:
        pictures = transformers.AutoImageProcessor.from_pretrained(
            str(folder), backend="pil", local_files_only=True
        )
        for sample in samples:
            found = pictures([[sample.pixels]], return_tensors="np", input_data_format=_LAST)
            findings += _tiles(sample, found["pixel_values"][0], settings, name)
        whole = transformers.AutoProcessor.from_pretrained(
            str(folder), backend="pil", local_files_only=True
        )
        for prompt, shown in prompts:
            found = whole(
                text=prompt.text, images=[[sample.pixels for sample in shown]],
                add_special_tokens=False, input_data_format=_LAST,
            )  # fmt: skip
            findings += _ids(prompt, np.asarray(found["input_ids"]).reshape(-1), name)
    except TRANSFORMERS_ERRORS as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        text = f"cannot be compared with in full: {first_line:.200}"
        findings.append(Finding("note", name, text))
    return sum(finding.severity == "error" for finding in findings), findings


def _tiles(
    sample: Sample, theirs: Array, settings: PictureSettings, name: str
) -> Iterator[Finding]:
    ours = sample.picture.tiles
    levels = settings.levels
    if len(theirs) != len(ours):
        cut = f"{len(ours)} ({sample.picture.rows} rows of {sample.picture.cols})"
        text = f"tiles are {cut}, by {name} {len(theirs)}."
        yield Finding("error", f"processor, {sample.name}", text, _AGAIN)
        return
    std = np.array(levels.std)[:, None, None] / levels.rescale_factor
    values = levels.pixel_values(ours)
    off = np.array([float(np.abs((a - b) * std).max())
                    for a, b in zip(values, theirs, strict=True)])  # fmt: skip
    wrong = np.flatnonzero(off > _MAX_LEVELS)
    if not wrong.size:
        return
    text = (
        f"{wrong.size} of {len(ours)} tiles are not those of {name}, by up to {off.max():.0f} of "
        f"255 levels{_moved(values, theirs, wrong)}."
    )
    yield Finding("error", f"processor, {sample.name}", text,
                  "Sizes, filter, order of the tiles, or rescaling and normalization.")  # fmt: skip


def _moved(ours: Array, theirs: Array, wrong: Array) -> str:
    """Tiles that stand in other places."""
    found = []
    for i in wrong[:_SHOWN]:
        same = [j for j in range(len(theirs)) if np.allclose(ours[i], theirs[j], atol=0.05)]
        if same:
            found.append(f"tile {int(i)} is its tile {same[0]}")
    return f": {', '.join(found)}" if found else ""


def _ids(prompt: PicturePrompt, theirs: Array, name: str) -> Iterator[Finding]:
    ours = prompt.ids
    if np.array_equal(ours, theirs):
        return
    least = min(ours.size, theirs.size)
    unlike = np.flatnonzero(ours[:least] != theirs[:least])
    if unlike.size:
        at = int(unlike[0])
        where = f"the first at {at}: {int(ours[at])}, there {int(theirs[at])}"
    else:
        where = f"{ours.size} ids, there {theirs.size}"
    yield Finding(
        "error", f"ids, {prompt.label}", f"are not those of {name}: {unlike.size} differ, {where}.",
        "The tokens around the tiles of a picture: rows and columns, line ends, the whole picture.",
    )  # fmt: skip


def _differing(expected: Any, found: Any) -> str:
    if not isinstance(expected, dict) or not isinstance(found, dict):
        return ""
    keys = sorted(k for k in {*expected, *found} if expected.get(k) != found.get(k))
    return f" ({', '.join(keys[:_SHOWN])})"


def _equal(found: Any, expected: Any) -> bool:
    """Numbers as written and read again."""
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return all(_equal(a, b) for a, b in zip(found, expected, strict=True))
    if isinstance(expected, float) and isinstance(found, int | float):
        return abs(found - expected) <= 1e-6 * abs(expected)
    return bool(found == expected)


def levels_of(settings: PictureSettings, tiles: Sequence[U8]) -> list[F32]:
    """Each tile as the tower takes it, float32 [3, S, S]."""
    return [settings.levels.pixel_values(tile[None])[0] for tile in tiles]
