"""A model that sees: does its bundle see the same?  From pixels to the logits after a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mnnsmith.conversion.prepare import Prepared
from mnnsmith.engine import Engine
from mnnsmith.engine.runner import tile_digest
from mnnsmith.errors import EngineError, UsageError
from mnnsmith.models.language_model import VisionModel
from mnnsmith.verify.checks.exact import SETTINGS
from mnnsmith.verify.checks.picture_processor import (
    compare_settings,
    compare_with_transformers,
    levels_of,
)
from mnnsmith.verify.checks.statistical import WARNED_KL
from mnnsmith.verify.checks.vision_tower import (
    Compared,
    Place,
    compare_places,
    opened,
    place_fault,
    tower_places,
)
from mnnsmith.verify.context import Context, Level
from mnnsmith.verify.measure.intervals import MIN_BLOCKS, block_means, mean_interval, rate_interval
from mnnsmith.verify.measure.metrics import Flags, divergence, pieces
from mnnsmith.verify.references.reference import F32, PictureReference, Reference
from mnnsmith.verify.results import (
    ExactCase,
    Finding,
    Interval,
    Outcome,
    ValueDifference,
    VisionFigures,
)
from mnnsmith.verify.texts.picture_prompts import (
    I64,
    PicturePrompt,
    PicturePrompts,
    bundle_settings,
)
from mnnsmith.verify.texts.pictures import Sample, sample_pictures
from mnnsmith.verify.texts.windows import BLOCK_TOKENS, shipped_sections
from mnnsmith.vision.settings import U8, PictureSettings, read_picture_settings

# Nats: ten times and more what float32 costs after some thousand embeddings.
MAX_KL = 1e-6

_TILES: dict[Level, int] = {"quick": 2, "full": 6}
_PICTURES: dict[Level, int] = {"quick": 3, "full": 7}
# Of the text after a picture that is scored; whole blocks.
_TEXT_TOKENS: dict[Level, int] = {"quick": 4 * BLOCK_TOKENS, "full": 8 * BLOCK_TOKENS}
_DECODED = 4
# Of `_exact`.
_CASES = 4
_QUESTIONS = ("Describe the picture.", "What is in it?", "Which colors do you see?")
_NOT_FINITE = 1e30


@dataclass(frozen=True)
class _Case:
    case: ExactCase
    label: str
    first: int | None


def check_vision(context: Context) -> Outcome[VisionFigures]:
    """Compare processor, tower by layer, connector, and logits of text after pictures.

    Fails where settings, tiles or ids are not the original's, where a value of the tower differs
    by more than `allowed_error` in float, or the logits by more than `MAX_KL`.  As shipped it only
    measures.  Raises `UsageError` without an original, or for one of text alone.
    """
    original = context.original
    if original is None or original.model.vision is None:
        raise UsageError("vision is compared with that of the original.", "Give --source MODEL.")
    vision = original.model.vision
    files, settings = bundle_settings(context.bundle)
    checkpoint = original.checkpoint
    truth = read_picture_settings(checkpoint.processor, checkpoint.origin)
    samples = sample_pictures(context.images, settings)
    # Those of few tiles first: they cost least.
    samples.sort(key=lambda sample: len(sample.picture.tiles))
    findings = list(compare_settings(context, original, files))
    canvas = context.bundle.manifest.model["vision"].get("profile") == "canvas"
    with PicturePrompts(context.bundle, settings, vision.image_token, canvas=canvas) as prompts:
        work = _Work(context, original, vision, truth, samples, prompts)
        figures, more = work.run()
    return Outcome(_summary(figures, findings + more), figures, tuple(findings + more))


@dataclass(frozen=True)
class _Work:
    """One check: what it compares, and on what.  settings: the original's, of pictures."""

    context: Context
    original: Prepared
    vision: VisionModel
    settings: PictureSettings
    samples: Sequence[Sample]
    prompts: PicturePrompts

    def run(self) -> tuple[VisionFigures, list[Finding]]:
        context = self.context
        asked = (self.samples[:1], self._pair())
        one, two = (self.prompts.make(*each) for each in zip(asked, _QUESTIONS, strict=False))
        shown = [(one, asked[0]), (two, asked[1])]
        different, findings = compare_with_transformers(context, self.settings, self.samples, shown)
        pixels = levels_of(self.settings, self._tiles())
        places = tower_places(self.vision)
        bisected: tuple[ValueDifference, ...] = ()
        with context.open_reference("stored") as reference:
            name, sees = reference.name, _sees(reference)
            exactly = opened(context, **SETTINGS)
            exact = compare_places(context, self.vision, places, sees, pixels, exactly)
            first = next((compared for compared in exact if compared.differs), None)
            if first is not None:
                bisected, fault = place_fault(context, self.original, first, sees, pixels, exactly)
                findings.append(fault)
            text = self._text(0, 2 * _DECODED)
            with exactly(context.bundle.path, all_logits=True) as engine:
                cases = list(
                    self._exact(engine, reference, one.followed_by(text), two.followed_by(text))
                )
            findings += _faults(cases, first)
            if len(cases) < _CASES:
                findings.append(_too_long(context))
        with context.open_reference("original") as reference:
            shipped, kl, top1, tokens = self._shipped(reference, places, pixels)
            if reference.pictures is None:
                findings.append(Finding("note", "as shipped", "was not compared: the saved "
                                        "reference holds no pictures."))  # fmt: skip
        if kl is not None and kl.mean > WARNED_KL:
            findings.append(_costly(kl))
        return VisionFigures(
            reference=name,
            pictures=len(self.samples) + len(shown),
            pictures_different=different,
            tiles=len(pixels),
            exact=tuple(compared.figures(judged=True) for compared in exact),
            shipped=tuple(compared.figures(judged=False) for compared in shipped),
            first=None if first is None else first.place.value.name,
            bisected=bisected,
            cases=tuple(case.case for case in cases),
            max_kl=max((case.case.kl for case in cases), default=0.0),
            kl=kl,
            top1=top1,
            text_tokens=tokens,
        ), findings

    def _pair(self) -> list[Sample]:
        """Two pictures, the same one twice where there is no other."""
        return [self.samples[min(1, len(self.samples) - 1)], self.samples[0]]

    def _tiles(self) -> list[U8]:
        """Of each picture in turn the last tile, which shows the whole, then the others."""
        most = max(len(sample.picture.tiles) for sample in self.samples)
        turns = [
            sample.picture.tiles[-1 - turn]
            for turn in range(most)
            for sample in self.samples
            if turn < len(sample.picture.tiles)
        ]
        return turns[: _TILES[self.context.level]]

    def _text(self, number: int, tokens: int) -> list[int]:
        """The beginning of one of the shipped texts."""
        sections = shipped_sections()
        text = sections[number % len(sections)].text
        ids = self.prompts.tokenizer.encode(text)
        return [i for i in ids if i < self.context.bundle.vocab_size][:tokens]

    def _features(
        self, reference: PictureReference, tiles: Sequence[U8], cache: dict[str, F32]
    ) -> F32:
        """Embeddings of tiles, each computed once."""
        for tile in tiles:
            digest = tile_digest(tile)
            if digest not in cache:
                (pixels,) = levels_of(self.settings, [tile])
                cache[digest] = reference.see(pixels[None]).embeddings[0]
        return np.stack([cache[tile_digest(tile)] for tile in tiles])

    def _exact(
        self, engine: Engine, reference: Reference, one: PicturePrompt, two: PicturePrompt
    ) -> Iterator[_Case]:
        """Prompts at once, in parts, and token by token."""
        sees = _sees(reference)
        cache: dict[str, F32] = {}
        if not self._fits(one):
            return
        hidden = sees.run(one.ids, self._features(sees, one.tiles, cache))
        yield self._feed(engine, reference, one, hidden, "one picture", (len(one.ids),))
        if not self._fits(two):
            return
        hidden = sees.run(two.ids, self._features(sees, two.tiles, cache))
        yield self._feed(engine, reference, two, hidden, "two pictures", (len(two.ids),))
        # Behind the first picture and a token of what follows.
        places = np.flatnonzero(two.fed == self.vision.image_token)
        breaks = np.flatnonzero(np.diff(places) > 1)
        cut = int(places[breaks[len(breaks) // 2]]) + 2 if breaks.size else 2
        end = len(two.ids)
        yield self._feed(engine, reference, two, hidden, "split", (cut, end))
        ends = (end - _DECODED, *range(end - _DECODED + 1, end + 1))
        yield self._feed(engine, reference, two, hidden, "decode", ends)

    def _fits(self, prompt: PicturePrompt) -> bool:
        return len(prompt.ids) <= self.context.bundle.max_context

    def _feed(
        self,
        engine: Engine,
        reference: Reference,
        prompt: PicturePrompt,
        hidden: F32,
        name: str,
        ends: Sequence[int],
    ) -> _Case:
        engine.reset()
        found = []
        place = used = 0
        for end in ends:
            ids = prompt.fed[place:end]
            shown = _runs(ids, self.vision.image_token)
            tiles = prompt.shown[used : used + shown]
            found.append(engine.forward(ids.tolist(), all_positions=True, tiles=_stacked(tiles)))
            place, used = end, used + shown
        rows = np.concatenate(found)
        text: Flags = np.array(prompt.fed != self.vision.image_token, dtype=np.bool_)
        kl = np.full(len(rows), _NOT_FINITE)
        spread = 0.0
        error = 0.0
        for part in pieces(*rows.shape):
            expected = reference.logits(np.ascontiguousarray(hidden[part]))
            finite: Flags = np.asarray(np.isfinite(rows[part]).all(-1))
            given = np.where(finite[:, None], rows[part], np.float32(0))
            kl[part] = np.where(finite, divergence(given, expected), _NOT_FINITE)
            spread = max(spread, float(expected.std()))
            largest = np.where(text[part], np.abs(given - expected).max(-1), 0.0)
            error = max(error, float(largest.max()))
        bad = np.flatnonzero(text & ~(kl < MAX_KL))
        worst = float(kl[text].max())
        case = ExactCase(name, len(rows), error / spread, worst, not bad.size)
        return _Case(case, prompt.label, int(bad[0]) if bad.size else None)

    def _shipped(
        self, reference: Reference, places: Sequence[Place], pixels: Sequence[F32]
    ) -> tuple[list[Compared], Interval | None, Interval | None, int]:
        """What quantization costs: the tower by layer, and the text after pictures."""
        context, sees = self.context, reference.pictures
        if sees is None:
            return [], None, None, 0
        as_shipped = opened(context)
        shipped = compare_places(context, self.vision, places, sees, pixels, as_shipped)
        kls, best = [], []
        with as_shipped(context.bundle.path, all_logits=True) as engine:
            for number, sample in enumerate(self.samples[: _PICTURES[context.level]]):
                question = _QUESTIONS[number % len(_QUESTIONS)]
                prompt = self.prompts.make([sample], question)
                room = context.bundle.max_context - len(prompt.ids) - 1
                wanted = min(_TEXT_TOKENS[context.level], max(room, 0)) // BLOCK_TOKENS
                text = self._text(number, wanted * BLOCK_TOKENS)
                text = text[: len(text) // BLOCK_TOKENS * BLOCK_TOKENS]
                if not text:
                    continue
                whole = prompt.followed_by(text)
                features = self._features(sees, whole.tiles, {})
                hidden = sees.run(whole.ids, features)[-len(text) :]
                engine.reset()
                rows = engine.forward(
                    whole.fed.tolist(), all_positions=True, tiles=_stacked(whole.shown)
                )[-len(text) :]  # fmt: skip
                if not np.isfinite(rows).all():
                    raise EngineError(
                        f"as shipped, logits after the picture {sample.name} are not finite.",
                        "Values grew beyond what the settings hold: try precision high.",
                    )
                expected = reference.logits(np.ascontiguousarray(hidden))
                kls.append(divergence(rows, expected))
                best.append(rows.argmax(-1) == expected.argmax(-1))
        if sum(kl.size for kl in kls) < MIN_BLOCKS * BLOCK_TOKENS:
            return shipped, None, None, 0
        kl, same = np.concatenate(kls), np.concatenate(best)
        means = block_means(kl, BLOCK_TOKENS)
        return (
            shipped,
            mean_interval(means, low=0.0),
            rate_interval(block_means(same, BLOCK_TOKENS), BLOCK_TOKENS),
            kl.size,
        )


def _sees(reference: Reference) -> PictureReference:
    pictures = reference.pictures
    if pictures is None:
        raise UsageError(f"{reference.name}: cannot see.", "Give --reference transformers.")
    return pictures


def _stacked(tiles: Sequence[U8]) -> Sequence[U8] | None:
    return list(tiles) or None


def _runs(ids: I64, image_token: int) -> int:
    """How many runs of image tokens there are."""
    here = np.concatenate([[False], ids == image_token])
    return int((here[1:] & ~here[:-1]).sum())


def _faults(cases: Sequence[_Case], tower: Compared | None) -> Iterator[Finding]:
    failed = [case for case in cases if not case.case.passed]
    if not failed:
        return
    worst = failed[0]
    names = ", ".join(dict.fromkeys(case.case.name for case in failed))
    if tower is not None:
        hint = "The vision itself differs, as said above."
    elif {case.case.name for case in failed} <= {"split", "decode"}:
        hint = "Whole prompts are right: positions, masks or the cache after pictures are not."
    else:
        hint = (
            "The vision itself agrees, given right pixels: how the engine takes a tile in "
            "(image_mean and image_norm of llm_config.json, colors), where its embeddings go, or "
            "the text itself, of which the check exact tells."
        )
    yield Finding(
        "error",
        f"logits, {worst.label}",
        f"{names}: KL {worst.case.kl:.3g} (allowed {MAX_KL:g}), first at position {worst.first}.",
        hint,
    )


def _too_long(context: Context) -> Finding:
    return Finding(
        "note",
        "logits",
        f"not all were compared: a prompt with these pictures does not fit the bundle's "
        f"{context.bundle.max_context} tokens.",
    )


def _costly(kl: Interval) -> Finding:
    return Finding(
        "warning",
        "text after pictures",
        f"KL {kl.mean:.3g} is more than the {WARNED_KL:g} below which differences are rarely seen.",
        "If it is lower on text alone, the vision needs more bits: -vision8, or fp16.",
    )


def _summary(figures: VisionFigures, findings: Sequence[Finding]) -> str:
    errors = sum(finding.severity == "error" for finding in findings)
    kl = "" if figures.kl is None else (
        f"; as shipped KL {figures.kl.mean:.3g} ({figures.kl.low:.3g} to {figures.kl.high:.3g}) on "
        f"{figures.text_tokens} tokens after pictures"
    )  # fmt: skip
    if errors:
        where = "" if figures.first is None else f", the tower from {figures.first} on"
        return f"{errors} faults{where}; logits' KL {figures.max_kl:.2g}{kl}"
    worst = max(value.error for value in figures.exact)
    return (
        f"equal: {len(figures.exact)} values of the tower to {worst:.2g}, logits' KL "
        f"{figures.max_kl:.2g} at most{kl}"
    )
