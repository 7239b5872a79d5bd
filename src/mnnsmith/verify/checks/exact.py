"""Is the conversion right?  The bundle in float against the original with the bundle's own weights.

At `memory: high` and `precision: high` the engine computes in float32, as the reference does; what
differs by more than rounding is a fault of the graph, a format or the engine.  The same tokens are
fed in every way in which an app may feed them: at once, in parts, one by one, after going back, and
as the bundle's own greedy answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mnnsmith.engine import Engine
from mnnsmith.models.rope import LOW_POSITIONS
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.context import Context, Level
from mnnsmith.verify.measure.metrics import F64, Flags, divergence, pieces
from mnnsmith.verify.references.reference import F32, Reference
from mnnsmith.verify.references.together import run_together
from mnnsmith.verify.results import ExactCase, ExactFigures, Finding, Outcome
from mnnsmith.verify.texts.exact_prompts import Prompt, decisive_prompts

# Of the standard deviation of the logits, and in nats: ten times what float32 costs.
MAX_ERROR, MAX_KL = 1e-3, 1e-8
# The KL from position `LOW_POSITIONS` on.  There rope's angles are sums of two of the table, and
# transformers rounds position times frequency to float32: both are off by some 1e-4 (half a unit of
# the last place of the position, in radians), in ways of their own.  SmolLM2 shows 4e-8.
MAX_FAR_KL = 1e-6
# Below that many times the bounds, a difference may stay unseen at some positions.
_SLIGHT = 10
# 8: the KV cache is kept in float, whatever the bundle asks for.
SETTINGS = {"memory": "high", "precision": "high", "config": {"attention_mode": 8}}

_STEPS: dict[Level, int] = {"quick": 12, "full": 32}
_FED_FIRST = 17
# Of a long prompt, one by one.
_LAST_STEPS = 4
_GREEDY_PROMPT_TOKENS = 12
# JSON has no infinity.
_NOT_FINITE = sys.float_info.max


@dataclass(frozen=True)
class _Expected:
    """A prompt and what the reference makes of it: hidden [n, width]; spread: standard deviation
    of its logits."""

    prompt: Prompt
    hidden: F32
    spread: float


@dataclass(frozen=True)
class _Result:
    """A case, and where it stands: first: the first position beyond the bounds."""

    case: ExactCase
    label: str
    first: int | None


def check_exact(context: Context) -> Outcome[ExactFigures]:
    """Compare logits at every position of several prompts, fed in all ways.

    Fails where a difference exceeds `MAX_ERROR` or `MAX_KL` (far on `MAX_FAR_KL`); says at which
    position of which case it begins, and what that points to.  Prompts on which a router is near a
    tie are not used; if there are no others, a warning says so.
    """
    tokenizer = TextTokenizer(context.bundle.tokenizer_json())
    with context.open_reference("stored") as reference:
        prompts = decisive_prompts(context, tokenizer, reference)
        if not prompts:
            return Outcome(
                "not compared: routers are near ties on every prompt",
                ExactFigures(reference.name, str(SETTINGS["memory"]), (), 0.0),
                (Finding("warning", "routers", "every prompt that was drawn brings a router so "
                 "near a tie that rounding decides it; two right programs may then differ."),),
            )  # fmt: skip
        runs = run_together(reference, [prompt.ids for prompt in prompts])
        expected = [
            _expect(reference, prompt, run.hidden[0])
            for prompt, run in zip(prompts, runs, strict=True)
        ]
        with context.open_engine(
            context.bundle.path, threads=context.threads, all_logits=True, **SETTINGS
        ) as engine:
            results = list(_run(engine, reference, expected, _STEPS[context.level]))
    cases = tuple(result.case for result in results)
    figures = ExactFigures(
        reference.name, str(SETTINGS["memory"]), cases, max(case.kl for case in cases)
    )
    return Outcome(_summary(figures), figures, tuple(_findings(results)))


def _expect(reference: Reference, prompt: Prompt, hidden: F32) -> _Expected:
    count = total = squares = 0.0
    for part in pieces(len(hidden), reference.logits(hidden[:1]).shape[-1]):
        logits = reference.logits(hidden[part]).astype(np.float64)
        count += logits.size
        total += float(logits.sum())
        squares += float((logits**2).sum())
    return _Expected(prompt, hidden, float(np.sqrt(squares / count - (total / count) ** 2)))


def _run(
    engine: Engine, reference: Reference, expected: Sequence[_Expected], steps: int
) -> Iterator[_Result]:
    """Every case, in the order in which a fault is easiest to place."""
    main = expected[0]
    for n in sorted({1, 2, _FED_FIRST} & set(range(len(main.hidden)))):
        yield _feed(engine, reference, main, "prompt", (n,))
    length = len(main.hidden)
    for each in expected:
        if len(each.hidden) == length:
            yield _feed(engine, reference, each, "prompt", (length,))
    for cut in sorted({1, 7, length // 2, length - 1} & set(range(1, length))):
        yield _feed(engine, reference, main, "split", (cut, length))
    start = min(_FED_FIRST, length - 1)
    ends = range(start, min(start + steps, length) + 1)
    yield _feed(engine, reference, main, "decode", tuple(ends))
    for each in expected:
        if len(each.hidden) != length:
            yield from _long(engine, reference, each)
    yield from _reuse(engine, reference, expected)
    yield _greedy(engine, reference, main, steps)


def _long(engine: Engine, reference: Reference, expected: _Expected) -> Iterator[_Result]:
    """All but the end of a long prompt at once, and single steps, which are far from the first."""
    end = len(expected.hidden)
    most = end - _LAST_STEPS
    yield _feed(engine, reference, expected, "prompt", (most,))
    yield _go_on(engine, reference, expected, "decode", most, range(most + 1, end + 1))


def _feed(
    engine: Engine, reference: Reference, expected: _Expected, name: str, ends: Sequence[int]
) -> _Result:
    """Feed a prompt in parts that end at `ends`, from an empty cache; all parts count."""
    engine.reset()
    return _go_on(engine, reference, expected, name, 0, ends)


def _go_on(
    engine: Engine,
    reference: Reference,
    expected: _Expected,
    name: str,
    start: int,
    ends: Sequence[int],
) -> _Result:
    """Feed the tokens from `start` on, after what the cache holds."""
    first: int | None = None
    errors: list[float] = []
    kls: list[float] = []
    place = start
    for end in ends:
        ids = expected.prompt.ids[place:end].tolist()
        found = engine.forward(ids, all_positions=True)
        error, kl = _differences(found, reference, expected.hidden[place:end], expected.spread)
        bad = ~((error < MAX_ERROR) & (kl < _allowed_kl(place, end)))
        if first is None and bad.any():
            first = place + int(bad.argmax())
        errors.append(float(error.max()))
        kls.append(float(kl.max()))
        place = end
    case = ExactCase(name, place - start, max(errors), max(kls), first is None)
    return _Result(case, expected.prompt.label, first)


def _allowed_kl(start: int, end: int) -> F64:
    """For each position from `start` to `end`, float64."""
    return np.where(np.arange(start, end) < LOW_POSITIONS, MAX_KL, MAX_FAR_KL)


def _reuse(
    engine: Engine, reference: Reference, expected: Sequence[_Expected]
) -> Iterator[_Result]:
    """Go back and on again, and begin anew after another prompt: nothing of the old may stay."""
    # A long one would take as long as all else.
    main, other = expected[0], expected[min(1, len(expected) - 1)]
    length = len(main.hidden)
    half = length // 2
    engine.reset()
    engine.forward(main.prompt.ids[:half].tolist())
    # Other tokens, which the going back must make unseen.
    engine.forward(other.prompt.ids[: length - half].tolist())
    engine.rewind(half)
    yield _go_on(engine, reference, main, "reuse", half, (length,))
    engine.rewind(1)
    yield _go_on(engine, reference, main, "reuse", 1, (half, half + 1, length))
    yield _feed(engine, reference, other, "reuse", (len(other.hidden),))


def _greedy(engine: Engine, reference: Reference, main: _Expected, steps: int) -> _Result:
    """Each token of the bundle's greedy answer is the reference's best after the same beginning.

    error: by how much the reference holds another one for better.  There is no KL of a choice: 0.
    """
    prompt = main.prompt.ids[:_GREEDY_PROMPT_TOKENS]
    engine.reset()
    answer = list(engine.generate(prompt.tolist(), max_new_tokens=steps))
    label = f"the answer to {main.prompt.label}"
    ids = np.concatenate([prompt, np.array(answer, dtype=np.int64)])
    fed = ids[None, :-1]
    hidden = reference.run(fed).hidden[0, prompt.size - 1 :]
    if not reference.decisive(fed).all():
        return _Result(ExactCase("greedy", 0, 0.0, 0.0, True), label, None)
    logits = reference.logits(np.ascontiguousarray(hidden)).astype(np.float64)
    chosen = logits[np.arange(len(answer)), answer]
    gap: F64 = (logits.max(-1) - chosen) / main.spread
    bad = gap >= MAX_ERROR
    first = prompt.size + int(np.argmax(bad)) if np.any(bad) else None
    case = ExactCase("greedy", len(answer), float(gap.max()), 0.0, first is None)
    return _Result(case, label, first)


def _differences(found: F32, reference: Reference, hidden: F32, spread: float) -> tuple[F64, F64]:
    """Of each row: the largest difference of logits over the spread, and KL, both float64 [n]."""
    error, kl = np.empty(len(found)), np.empty(len(found))
    for part in pieces(*found.shape):
        expected = reference.logits(np.ascontiguousarray(hidden[part]))
        finite: Flags = np.asarray(np.isfinite(found[part]).all(-1))
        rows = np.where(finite[:, None], found[part], np.float32(0))
        largest = np.abs(rows.astype(np.float64) - expected).max(-1) / spread
        error[part] = np.where(finite, largest, _NOT_FINITE)
        kl[part] = np.where(finite, divergence(rows, expected), _NOT_FINITE)
    return error, kl


def _summary(figures: ExactFigures) -> str:
    failed = sum(not case.passed for case in figures.cases)
    worst = max(case.error for case in figures.cases)
    tokens = sum(case.tokens for case in figures.cases)
    head = f"{failed} of {len(figures.cases)} runs differ" if failed else "equal"
    return f"{head}: KL at most {figures.max_kl:.2g}, error {worst:.2g}, {tokens} tokens"


def _findings(results: Sequence[_Result]) -> Iterator[Finding]:
    """The first failure of each kind; the first of them says what the pattern points to."""
    hint: str | None = _diagnosis(results)
    for name in dict.fromkeys(result.case.name for result in results):
        same = [result for result in results if result.case.name == name]
        failed = [result for result in same if not result.case.passed]
        if failed:
            worst = failed[0]
            yield Finding(
                "error",
                f"{name}, {worst.label}",
                f"differs from position {worst.first} on: error {worst.case.error:.3g} of the "
                f"logits' spread (allowed {MAX_ERROR:g}), KL {worst.case.kl:.3g} (allowed "
                f"{MAX_KL:g}, and {MAX_FAR_KL:g} from position {LOW_POSITIONS} on); "
                f"{len(failed)} of {len(same)} such runs differ.",
                hint,
            )
            hint = None
        if not any(result.case.tokens for result in same):
            yield Finding(
                "note", name, "not compared: a router is near a tie on the bundle's answer."
            )


def _diagnosis(results: Sequence[_Result]) -> str:
    """What the pattern of failures points to."""
    failed = {result.case.name for result in results if not result.case.passed}
    firsts = [r.first for r in results if r.case.name == "prompt" and r.first is not None]
    if "prompt" not in failed:
        if failed == {"reuse"}:
            return "Only going back fails: the KV cache keeps something of the forgotten tokens."
        if "split" not in failed:
            return "Prompts are right: the fault is in single steps or their KV cache."
        return "Whole prompts are right: positions or masks of later parts are wrong."
    where = "Find the place: mnnsmith verify DIR --check layers --bisect"
    cases = [result.case for result in results]
    if all(case.error < _SLIGHT * MAX_ERROR and case.kl < _SLIGHT * MAX_KL for case in cases):
        return (
            "It is slight, and where it begins says little: the epsilon of a norm, or a number of "
            f"low precision. {where}"
        )
    if min(firsts) > 0:
        return (
            f"The first token is right, so weights, norms and MLP are; attention is not: rope, "
            f"its scale, the mask, or the order of heads (from position {min(firsts)}). {where}"
        )
    return (
        f"The first token is wrong already: a weight, a norm, the MLP or the head. {where} ; if "
        "every block agrees there, it is the final norm or the head."
    )
