"""What quantization costs: the bundle as shipped against the original at full precision, on text.

The bundle runs with its own settings, as on a device.  Activations are quantized there at run time,
so two equally right graphs differ; only means over many tokens say something, and each comes with
its interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mnnsmith.engine import Engine
from mnnsmith.errors import UsageError
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.checks.greedy import divergence_position, engine_draft, greedy_text
from mnnsmith.verify.context import Context, Level, Progress
from mnnsmith.verify.measure.intervals import block_means, mean_interval, rate_interval
from mnnsmith.verify.measure.metrics import (
    RowScores,
    exponential,
    histogram,
    perplexity,
    score_rows,
)
from mnnsmith.verify.references.reference import F32, Reference
from mnnsmith.verify.results import (
    Finding,
    Interval,
    Outcome,
    SectionFigures,
    StatisticalFigures,
    TokenScore,
)
from mnnsmith.verify.texts.windows import (
    BLOCK_TOKENS,
    Window,
    Windows,
    cut_windows,
    shipped_sections,
    user_sections,
)

# Beyond these, no recipe is to blame: the bundle is another model, or broken.
MIN_USABLE_TOP1 = 0.5
MAX_USABLE_KL = 1.0
# Beyond this, users notice: perplexity grows by about a tenth.
WARNED_KL = 0.1

_GREEDY_PROMPTS: dict[Level, int] = {"quick": 4, "full": 8}
_GREEDY_TOKENS: dict[Level, int] = {"quick": 16, "full": 32}
# The shortest window is longer.
_GREEDY_PROMPT_TOKENS = 24
# Of the shipped text; of a user's, the beginning.
_SAMPLED_SECTIONS = ("english-story", "python")
_SAMPLE_TOKENS = 128
# Tokens of one run of the reference, which may read all weights anew for each run.
_RUN_TOKENS = 16384


@dataclass(frozen=True)
class _Scored:
    window: Window
    rows: RowScores


@dataclass(frozen=True)
class _NotFinite:
    """Which model gave a logit that is no number, after which token of which window."""

    model: str
    window: int
    row: int


def check_statistical(context: Context) -> Outcome[StatisticalFigures | None]:
    """Compare distributions on text; the figures are None where logits are no finite numbers.

    Fails for a bundle that is hardly the same model (`MIN_USABLE_TOP1`, `MAX_USABLE_KL`); what
    quantization may cost is for the user's gates to say.  Raises `UsageError` for a text that
    cannot be used, and where bundle and reference differ in vocabulary.
    """
    tokenizer = TextTokenizer(context.bundle.tokenizer_json())
    sections = user_sections(context.texts) if context.texts else shipped_sections()
    cut = cut_windows(sections, tokenizer, context.level, context.bundle.max_context)
    prompts = _greedy_prompts(cut.windows, context.level)
    tokens = min(_GREEDY_TOKENS[context.level], context.bundle.max_context - prompts.shape[1])
    with (
        context.open_reference("original") as reference,
        context.open_engine(
            context.bundle.path, threads=context.threads, all_logits=True
        ) as engine,
    ):
        scored = _score(engine, reference, cut.windows, context.progress)
        if isinstance(scored, _NotFinite):
            return _not_finite(scored, cut.windows)
        draft = engine_draft(engine) if reference.computes else None
        texts = greedy_text(reference, prompts, tokens, draft)
        greedy = tuple(
            divergence_position(engine, prompt, text)
            for prompt, text in zip(prompts, texts, strict=True)
        )
        name = reference.name
    figures = _figures(name, cut, scored, (tokens, greedy), _sample(scored, tokenizer))
    return Outcome(_summary(figures), figures, tuple(_findings(figures, cut, bool(context.texts))))


def _score(
    engine: Engine, reference: Reference, windows: Sequence[Window], progress: Progress
) -> list[_Scored] | _NotFinite:
    """Every window's rows, in the order of the windows."""
    scored: dict[int, _Scored] = {}
    for places, hidden in _reference_runs(reference, windows):
        for place, rows in zip(places, hidden, strict=True):
            window = windows[place]
            expected = reference.logits(np.ascontiguousarray(rows[window.skip :]))
            engine.reset()
            found = engine.forward(window.inputs.tolist(), all_positions=True)[window.skip :]
            _same_width(found, expected)
            for model, logits in (("reference", expected), ("bundle", found)):
                bad = ~np.isfinite(logits).all(-1)
                if bad.any():
                    return _NotFinite(model, place, int(bad.argmax()))
            scored[place] = _Scored(window, score_rows(found, expected, window.targets))
            progress(len(scored), len(windows))
    return [scored[place] for place in range(len(windows))]


def _reference_runs(
    reference: Reference, windows: Sequence[Window]
) -> Iterator[tuple[list[int], F32]]:
    """Windows of equal length together: their places, and hidden states [windows, n, hidden]."""
    for length in sorted({window.inputs.size for window in windows}):
        places = [i for i, window in enumerate(windows) if window.inputs.size == length]
        step = max(1, _RUN_TOKENS // length)
        for start in range(0, len(places), step):
            part = places[start : start + step]
            yield part, reference.run(np.stack([windows[i].inputs for i in part])).hidden


def _same_width(found: F32, expected: F32) -> None:
    if found.shape != expected.shape:
        raise UsageError(
            f"the bundle gives {found.shape[-1]} logits a token, the reference "
            f"{expected.shape[-1]}.",
            "Is the source the model that the bundle was made of?",
        )


def _greedy_prompts(windows: Sequence[Window], level: Level) -> npt.NDArray[np.int64]:
    """Beginnings of sections, or of windows where sections are few, int64 [prompts, n].

    Those of level quick are among those of level full, which a saved reference may be of.
    """
    length = _GREEDY_PROMPT_TOKENS
    starts = list({window.section: window for window in reversed(windows)}.values())[::-1]
    pool = starts if len(starts) >= _GREEDY_PROMPTS[level] else windows
    count = min(_GREEDY_PROMPTS[level], len(pool))
    chosen = np.linspace(0, len(pool) - 1, count).round().astype(int)
    return np.stack([pool[i].ids[:length] for i in chosen])


def _figures(
    reference: str,
    cut: Windows,
    scored: Sequence[_Scored],
    greedy: tuple[int, tuple[int | None, ...]],
    sample: tuple[TokenScore, ...],
) -> StatisticalFigures:
    kl = np.concatenate([part.rows.kl for part in scored])
    loss = np.concatenate([part.rows.loss for part in scored])
    reference_loss = np.concatenate([part.rows.reference_loss for part in scored])
    top1 = np.concatenate([part.rows.top1 for part in scored])
    top5 = np.concatenate([part.rows.top5 for part in scored])
    block_kl, block_top1 = block_means(kl, BLOCK_TOKENS), block_means(top1, BLOCK_TOKENS)
    # Paired: each token's loss in one model minus that in the other, of the same token.
    block_increase = block_means(loss - reference_loss, BLOCK_TOKENS)
    increase = mean_interval(block_increase)
    return StatisticalFigures(
        reference=reference,
        text_sha256=cut.sha256,
        tokens=cut.tokens,
        block_tokens=BLOCK_TOKENS,
        kl=mean_interval(block_kl, low=0.0),
        kl_median=float(np.median(kl)),
        kl_p99=float(np.percentile(kl, 99)),
        kl_max=float(kl.max()),
        top1=rate_interval(block_top1, BLOCK_TOKENS),
        top5=rate_interval(block_means(top5, BLOCK_TOKENS), BLOCK_TOKENS),
        perplexity=perplexity(loss),
        reference_perplexity=perplexity(reference_loss),
        loss_increase=increase,
        # exp grows with its argument, so it carries the interval's ends over.
        perplexity_increase=Interval(
            *(exponential(x) - 1 for x in (increase.mean, increase.low, increase.high))
        ),
        block_kl=tuple(block_kl.tolist()),
        block_loss_increase=tuple(block_increase.tolist()),
        block_top1=tuple(block_top1.tolist()),
        kl_histogram=histogram(kl),
        sections=_sections(scored),
        greedy_tokens=greedy[0],
        greedy=greedy[1],
        sample=sample,
    )


def _sections(scored: Sequence[_Scored]) -> tuple[SectionFigures, ...]:
    result = []
    for name in dict.fromkeys(part.window.section for part in scored):
        rows = [part.rows for part in scored if part.window.section == name]
        kl = np.concatenate([part.kl for part in rows])
        result.append(
            SectionFigures(
                name=name,
                tokens=kl.size,
                kl=float(kl.mean()),
                top1=float(np.concatenate([part.top1 for part in rows]).mean()),
                perplexity=perplexity(np.concatenate([part.loss for part in rows])),
                reference_perplexity=perplexity(
                    np.concatenate([part.reference_loss for part in rows])
                ),
            )
        )
    return tuple(result)


def _sample(scored: Sequence[_Scored], tokenizer: TextTokenizer) -> tuple[TokenScore, ...]:
    """The first tokens of two sections, or of the text."""
    first = {part.window.section: part for part in reversed(scored)}
    chosen = [first[name] for name in _SAMPLED_SECTIONS if name in first] or scored[:1]
    result = []
    for part in chosen:
        count = min(_SAMPLE_TOKENS // len(chosen), part.window.targets.size)
        rows, start = part.rows, part.window.skip
        for i in range(count):
            before = int(part.window.ids[start + i])
            result.append(
                TokenScore(
                    text=_text_after(tokenizer, before, int(part.window.targets[i])),
                    kl=float(rows.kl[i]),
                    best=_text_after(tokenizer, before, int(rows.best[i])),
                    reference_best=_text_after(tokenizer, before, int(rows.reference_best[i])),
                    loss=float(rows.loss[i]),
                    reference_loss=float(rows.reference_loss[i]),
                )
            )
    return tuple(result)


def _text_after(tokenizer: TextTokenizer, before: int, token: int) -> str:
    """The text that a token adds; alone, it would lose the space that some tokenizers put there."""
    beginning = tokenizer.decode([before], skip_special=False)
    whole = tokenizer.decode([before, token], skip_special=False)
    if whole.startswith(beginning):
        return whole[len(beginning) :]
    return tokenizer.decode([token], skip_special=False)


def _summary(figures: StatisticalFigures) -> str:
    increase = figures.perplexity_increase
    return (
        f"KL {figures.kl.mean:.3g} ({figures.kl.low:.3g} to {figures.kl.high:.3g}), "
        f"top-1 {figures.top1.mean:.1%}, perplexity {figures.perplexity:.2f} against "
        f"{figures.reference_perplexity:.2f} ({increase.mean:+.1%}, {increase.low:+.1%} to "
        f"{increase.high:+.1%}) on {figures.tokens} tokens"
    )


def _findings(figures: StatisticalFigures, cut: Windows, users_text: bool) -> Iterator[Finding]:
    kl, top1 = figures.kl.mean, figures.top1.mean
    if kl > MAX_USABLE_KL or top1 < MIN_USABLE_TOP1:
        yield Finding(
            "error",
            "text",
            f"KL {kl:.3g}, top-1 {top1:.1%}: this is hardly the same model (a usable bundle has "
            f"at most {MAX_USABLE_KL:g} and at least {MIN_USABLE_TOP1:.0%}).",
            "If the exact check passes, the recipe stores too few bits: convert with w4g32 or w8. "
            "If not, its finding says where to look.",
        )
    elif kl > WARNED_KL:
        yield Finding(
            "warning",
            "text",
            f"KL {kl:.3g} is more than the {WARNED_KL:g} below which differences are rarely seen.",
            "Smaller blocks or more bits cost size and win quality back: w4g32-head8, w8g64, w8.",
        )
    if users_text and not cut.complete:
        yield Finding(
            "note",
            "text",
            f"the text is longer than the {figures.tokens} tokens that were scored.",
            "Level full scores more than quick; both take the beginning of each file.",
        )


def _not_finite(found: _NotFinite, windows: Sequence[Window]) -> Outcome[StatisticalFigures | None]:
    window = windows[found.window]
    before = sum(w.targets.size for w in windows[: found.window] if w.section == window.section)
    where = f"{window.section}, token {before + found.row}"
    hint = (
        "Values grew beyond what the settings hold: the ranges check says in which layer. Try "
        "precision high in config.json."
        if found.model == "bundle"
        else "The original itself is damaged, or cannot be computed in float32."
    )
    message = f"the {found.model} gives logits that are no finite numbers."
    return Outcome(
        f"the {found.model}'s logits are not finite",
        None,
        (Finding("error", where, message, hint),),
    )
