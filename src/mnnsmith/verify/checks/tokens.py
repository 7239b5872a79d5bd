"""Whether a bundle's tokenizers give the ids and the texts of the original's.

Two are looked at: `tokenizer.json` as our own run time uses it, and the engine's, which an app on a
device will use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mnnsmith.bundle.bundle import TOKENIZER_JSON
from mnnsmith.errors import EngineError, MnnsmithError
from mnnsmith.mnn.config_files import TOKENIZER_FILE
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.checks.engine_limits import Difference, explanation, shown_explanation
from mnnsmith.verify.checks.token_files import Truth, compare_files, truth
from mnnsmith.verify.context import Context
from mnnsmith.verify.references.torch_model import load_tokenizer, quiet
from mnnsmith.verify.results import Finding, Outcome, Severity, TextFigures
from mnnsmith.verify.texts.corpus import corpus_strings
from mnnsmith.verify.texts.user_text import read_user_texts

# Every how manieth text of the corpus a level takes.
_STRIDE = {"quick": 4, "full": 1}
# A user's text goes in pieces: the engine's time grows with the square of a piece's length.
_PIECE_CHARS = 4000
_MAX_PIECES = {"quick": 2_000, "full": 20_000}
_EXAMPLES = 3
# What transformers raises for a tokenizer that it cannot open; it has no errors of its own.
TRANSFORMERS_ERRORS = (
    OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError
)  # fmt: skip
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class _Case:
    """A text, and the ids and the shown text that are right for it."""

    text: str
    ids: list[int]
    shown: str


def check_tokens(context: Context) -> Outcome[TextFigures]:
    """Encode and decode the corpus and the user's files with every tokenizer at hand.

    Ids and texts that differ are errors, but for what the engine cannot do and the conversion said
    so: those are warnings.
    """
    expected = truth(context)
    findings = list(compare_files(context.bundle, expected))
    cases = _cases(expected, _texts(context))
    ours = TextTokenizer(context.bundle.tokenizer_json())
    different = _Differences(TOKENIZER_JSON, f"as {expected.name}'s")
    for case in cases:
        ids = ours.encode(case.text, allow_special=True)
        different.compare(case.text, ids, case.ids)
        different.compare(case.text, ours.decode(case.ids, skip_special=False), case.shown)
    findings += different.findings("error")
    findings += _transformers(context, cases)
    engine_texts, engine_findings = _engine(context, expected, cases)
    findings += engine_findings
    count = len(different.texts)
    summary = f"{len(cases)} texts: {_said(count)}, with the engine's tokenizer {engine_texts}"
    if count == engine_texts == 0:
        summary = f"{len(cases)} texts: ids and texts are equal, with the engine's tokenizer, too"
    return Outcome(summary, TextFigures(len(cases), count, engine_texts), tuple(findings))


def _said(count: int) -> str:
    return f"{count} differ" if count else "none differs"


def _texts(context: Context) -> list[str]:
    """The corpus thinned out, then the lines and larger pieces of the user's files."""
    texts = dict.fromkeys(corpus_strings()[:: _STRIDE[context.level]])
    pieces: dict[str, None] = {}
    for text in read_user_texts(context.texts):
        # The engine's interface ends a text at NUL.
        text = text.replace("\0", " ")
        for part in (*text.splitlines(), text):
            for start in range(0, len(part), _PIECE_CHARS):
                pieces[part[start : start + _PIECE_CHARS]] = None
    chosen = list(pieces)
    stride = -(-len(chosen) // _MAX_PIECES[context.level]) or 1
    return list(texts | dict.fromkeys(chosen[::stride]))


def _cases(expected: Truth, texts: Sequence[str]) -> list[_Case]:
    """What the library itself makes of the original's file, without our class around it."""
    from tokenizers import Tokenizer

    # Raises our errors for a damaged file, which the library would report in its own way.
    TextTokenizer(expected.files.tokenizer_json)
    library = Tokenizer.from_str(expected.files.tokenizer_json)
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, "dropout", None) is not None:
        library.model.dropout = None
    ids = [found.ids for found in library.encode_batch(list(texts), add_special_tokens=False)]
    shown = library.decode_batch(ids, skip_special_tokens=False)
    return [_Case(*parts) for parts in zip(texts, ids, shown, strict=True)]


class _Differences:
    """Texts of which a tokenizer gives something else, with the plainest as examples."""

    def __init__(self, where: str, expected: str) -> None:
        self.where = where
        self.texts: dict[str, str] = {}
        self._expected = expected

    def compare(self, text: str, found: list[int] | str, expected: list[int] | str) -> None:
        if found != expected and text not in self.texts:
            self.add(text, found, expected)

    def add(self, text: str, found: list[int] | str, expected: list[int] | str) -> None:
        kind = "shown as" if isinstance(found, str) else "ids"
        shown, wanted = _around_difference(found, expected)
        self.texts.setdefault(text, f"{text!r:.60}: {kind} {shown}, expected {wanted}")

    def findings(self, severity: Severity, because: str | None = None) -> Iterator[Finding]:
        """One finding with some examples, or none."""
        if not self.texts:
            return
        shortest = sorted(self.texts, key=lambda text: (len(text), text))[:_EXAMPLES]
        examples = "; ".join(self.texts[text] for text in shortest)
        count = len(self.texts)
        noun = "text is" if count == 1 else "texts are"
        cause = f" ({because})" if because else ""
        yield Finding(
            severity, self.where, f"{count} {noun} not {self._expected}{cause}: {examples}.",
            None if severity != "error" else
            "Convert the model again, or copy the bundle again; if that does not help, please "
            "report it with one of these texts.",
        )  # fmt: skip


def _around_difference(found: list[int] | str, expected: list[int] | str) -> tuple[str, str]:
    """Both values, shortened to where they start to differ."""
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
        min(len(found), len(expected)),
    )
    start = max(0, at - 1)
    width = 24 if isinstance(found, str) else 6

    def short(value: list[int] | str) -> str:
        part = repr(value[start : start + width])
        before, after = "... " if start else "", " ..." if start + width < len(value) else ""
        return f"{before}{part}{after}"

    return short(found), short(expected)


def _transformers(context: Context, cases: Sequence[_Case]) -> Iterator[Finding]:
    """What transformers makes of the original's folder: a way that shares no code of ours.

    A difference is a warning: `tokenizer.json` is what the model's authors gave, and some of its
    tokenizer classes read other files.
    """
    folder = original_folder(context)
    if folder is None or importlib.util.find_spec("transformers") is None:
        return
    name = "transformers' tokenizer of the original"
    try:
        tokenizer = load_tokenizer(folder)
        texts = [case.text for case in cases]
        with quiet():
            ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    except (MnnsmithError, *TRANSFORMERS_ERRORS) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        yield Finding("note", name, f"cannot be compared with: {first_line:.200}")
        return
    different = _Differences(name, f"as {TOKENIZER_JSON} gives them")
    for case, found in zip(cases, ids, strict=True):
        different.compare(case.text, found, case.ids)
    yield from different.findings("warning")


def original_folder(context: Context) -> Path | None:
    """The folder of the original where it is a transformers checkpoint, which a GGUF is not."""
    if context.original is None or context.original.checkpoint.format != "safetensors":
        return None
    return context.original.checkpoint.files[0].parent


def _engine(context: Context, expected: Truth, cases: Sequence[_Case]) -> tuple[int, list[Finding]]:
    """How many texts the engine's own tokenizer takes otherwise, and what is to be said of them."""
    limits = _Limits(expected)
    # Ids beyond the model's rows cannot be asked for.
    rows = context.bundle.vocab_size
    try:
        with context.open_engine(context.bundle.path) as engine:
            for done, case in enumerate(cases, 1):
                limits.compare_ids(case, engine.engine_tokenize(case.text))
                context.progress(done, len(cases))
                if max(case.ids, default=0) < rows:
                    shown = engine.engine_detokenize(case.ids)
                    limits.compare_shown(case, shown.decode("utf-8", "replace"))
    except EngineError as error:
        broken = Finding("error", TOKENIZER_FILE, error.message, error.hint)
        return limits.count, [*limits.findings(), broken]
    return limits.count, list(limits.findings())


class _Limits:
    """What the engine does otherwise: faults, and apart from them what is known, by its cause."""

    def __init__(self, expected: Truth) -> None:
        self._declared = expected.report.differences
        self._prefix = list(expected.report.prefix_ids)
        self._added = tuple(token.content for token in expected.mtok.added_tokens)
        self._library = TextTokenizer(expected.files.tokenizer_json)
        self._faults = _Differences(TOKENIZER_FILE, "as the engine should take it")
        self._known: dict[str, _Differences] = {}
        self._shown: dict[str, _Differences] = {}

    @property
    def count(self) -> int:
        """Texts with other ids, and those that are shown otherwise for no known cause.

        A habit of showing, such as a space before every text, is no difference of the tokenizer.
        """
        return len(set(self._faults.texts).union(*(group.texts for group in self._known.values())))

    def compare_ids(self, case: _Case, ids: list[int]) -> None:
        wanted = self._prefix + case.ids
        if ids != wanted:
            texts = [self._library.decode(given, skip_special=False) for given in (ids, wanted)]
            same_pieces = sorted(ids) == sorted(wanted)
            found = Difference(case.text, self._added, same_pieces, texts[0] == texts[1])
            self._group(self._known, explanation(found, self._declared)).add(case.text, ids, wanted)

    def compare_shown(self, case: _Case, shown: str) -> None:
        if shown != case.shown:
            why = shown_explanation(shown, case.shown, self._declared)
            self._group(self._shown, why).add(case.text, shown, case.shown)

    def findings(self) -> Iterator[Finding]:
        yield from self._faults.findings("error")
        for why, group in self._known.items():
            yield from group.findings("warning", why)
        for why, group in self._shown.items():
            yield from group.findings("note", why)

    def _group(self, known: dict[str, _Differences], why: str | None) -> _Differences:
        if why is None:
            return self._faults
        where = f"{TOKENIZER_FILE}, in the engine"
        return known.setdefault(why, _Differences(where, "as the original's, as is known"))
