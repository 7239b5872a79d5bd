"""Finding what a bundle was made of, and making sure that it is that."""

from __future__ import annotations

import os
from pathlib import Path

from mnnsmith.bundle import Bundle
from mnnsmith.conversion.prepare import Prepared, prepare
from mnnsmith.errors import RecipeError, SourceError, UsageError
from mnnsmith.files import sha256_of
from mnnsmith.quant.recipe import Recipe, parse_recipe

# Checks that need no original: they hold a bundle against itself where there is none.
WITHOUT_ORIGINAL = ("files", "tokens", "template")
_SHOWN = 4


def open_original(
    bundle: Bundle,
    source: str | Path | None,
    *,
    revision: str | None,
    offline: bool,
    weights: bool,
) -> Prepared:
    """The original of `bundle`, prepared as it was for the bundle: same recipe, same context.

    source: as for `convert`; None takes the hub id that the manifest names, if there is one, out of
    the hub's local cache.  weights: whether they must be on this machine; a hub model's are fetched
    unless `offline`.

    Raises `UsageError` where the original is not known, or `source` is another model.
    """
    if source is None:
        known = bundle.manifest.data["source"]
        if not known.get("revision"):
            raise UsageError(
                f"{bundle.path}: the original is not known (the bundle was made of "
                f"{known.get('name')!r:.120}).",
                "Give it with --source MODEL, or choose checks that need none: --check "
                + ",".join(WITHOUT_ORIGINAL),
            )
        # Nothing is fetched that nobody asked for.
        source, revision, offline = str(known["name"]), str(known["revision"]), True
    ready = prepare(
        source,
        recipe=_recipe(bundle),
        revision=revision,
        offline=offline,
        max_context=bundle.max_context,
        fetch=weights,
    )
    _check_same(bundle, ready, weights=weights)
    return ready


def _recipe(bundle: Bundle) -> Recipe:
    where = f"{bundle.path}: recipe of the manifest"
    try:
        return parse_recipe(bundle.manifest.data["recipe"], where)
    except RecipeError as error:
        raise UsageError(
            error.message, "Use the version of mnnsmith that made the bundle, or convert again."
        ) from error


def _check_same(bundle: Bundle, ready: Prepared, *, weights: bool) -> None:
    """Hold the files' hashes against those that the manifest noted; large ones take a while.

    weights: False where files of weights may not be there.
    """
    noted = bundle.manifest.data["source"].get("files")
    if not isinstance(noted, dict) or not noted:
        raise UsageError(
            f"{bundle.path}: its manifest does not say which files it was made of, so that they "
            "cannot be told from others.",
            "Convert the model again; or choose checks that need no original, without --source.",
        )
    expected = noted
    paths = {
        os.fsencode(path.name).decode("utf-8", "replace"): path for path in ready.checkpoint.files
    }
    other = [name for name, path in paths.items() if name in expected and not _is(path, expected)]
    missing = sorted(set(expected) - set(paths)) if weights else []
    if not other and not missing:
        return
    what = [f"{name} is another" for name in other] + [f"{name} is missing" for name in missing]
    shown = ", ".join(what[:_SHOWN]) + (", ..." if len(what) > _SHOWN else "")
    raise UsageError(
        f"{ready.checkpoint.origin}: is not what {bundle.path.name} was made of: {shown}.",
        "Give the model that was converted, in the same version, or convert this one.",
    )


def _is(path: Path, expected: dict[str, object]) -> bool:
    name = os.fsencode(path.name).decode("utf-8", "replace")
    try:
        return sha256_of(path) == expected[name]
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}.") from error
