"""Texts that a bundle is judged on, as windows of token ids.

The shipped ones were written for this purpose: prose of several kinds, eight more languages, code,
markup and mathematics, each a section of its own (`evaluation_text/*.txt`).  Files of a user take
their place.

What is cut follows from text, tokenizer and level alone, so that one run of a reference serves many
bundles, and two runs can be compared token by token.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import UsageError
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.context import Level
from mnnsmith.verify.measure.intervals import MIN_BLOCKS
from mnnsmith.verify.texts.user_text import read_user_texts

I64 = npt.NDArray[np.int64]

FOLDER = "evaluation_text"
# Neighbouring tokens whose mean is one number of the statistics.
BLOCK_TOKENS = 32
WINDOW_TOKENS = 256
# Predictions that are scored: of all sections together, an equal part each.
MAX_TOKENS: dict[Level, int] = {"quick": 2304, "full": 32768}
# Of a long text, so much is tokenized for each token that is wanted; texts have two to six.
_CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Section:
    name: str
    text: str


@dataclass(frozen=True)
class Window:
    """A piece of one section, fed to an empty cache.

    ids: int64 [n].  skip: how many predictions at its beginning do not count, those of the tokens
    that the tokenizer puts before every text.
    """

    section: str
    ids: I64
    skip: int

    @property
    def inputs(self) -> I64:
        """What is fed, [n - 1]: of the last token there is nothing to predict."""
        return self.ids[:-1]

    @property
    def targets(self) -> I64:
        """The tokens that are predicted, by rows `skip` and on of the logits of `inputs`."""
        return self.ids[1 + self.skip :]


@dataclass(frozen=True)
class Windows:
    """All windows, in order.  complete: whether no section goes on for longer than was taken."""

    windows: tuple[Window, ...]
    complete: bool

    @property
    def tokens(self) -> int:
        """Predictions that count."""
        return sum(window.targets.size for window in self.windows)

    @property
    def sha256(self) -> str:
        """Of all that is fed and where it is cut: equal ones can be compared token by token."""
        digest = hashlib.sha256()
        for window in self.windows:
            header = f"{window.section}\n{window.ids.size} {window.skip}\n"
            digest.update(header.encode("utf-8", "surrogatepass"))
            digest.update(window.ids.astype("<i8").tobytes())
        return digest.hexdigest()


def shipped_sections() -> tuple[Section, ...]:
    """The texts that come with this package, by name."""
    folder = resources.files("mnnsmith.verify.texts") / FOLDER
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return tuple(
        Section(file.name.removesuffix(".txt"), file.read_text(encoding="utf-8"))
        for file in files
        if file.name.endswith(".txt")
    )


def user_sections(files: Sequence[Path]) -> tuple[Section, ...]:
    """Each file as a section; raises `UsageError` for one that is absent, empty or no UTF-8."""
    counts = Counter(file.name for file in files)
    names = (file.name if counts[file.name] == 1 else str(file) for file in files)
    texts = read_user_texts(files)
    return tuple(Section(name, text) for name, text in zip(names, texts, strict=True))


def cut_windows(
    sections: Sequence[Section], tokenizer: TextTokenizer, level: Level, max_context: int
) -> Windows:
    """Cut the beginning of every section into windows; no token counts twice.

    Windows hold whole blocks of `BLOCK_TOKENS` predictions, at most `WINDOW_TOKENS`, fewer where
    max_context, the tokens that the bundle takes, asks for it.  Raises `UsageError` where fewer
    than two blocks come of it.
    """
    leading = leading_ids(tokenizer)
    # Without a leading token, the first one of a window is fed and not predicted.
    spare = max(1, len(leading))
    longest = min(WINDOW_TOKENS, _whole_blocks(max_context + 1 - spare))
    share = max(BLOCK_TOKENS, _whole_blocks(MAX_TOKENS[level] // max(1, len(sections))))
    windows: list[Window] = []
    complete = True
    for section in sections:
        ids = tokenizer.encode(section.text[: _CHARS_PER_TOKEN * share])
        start, left = 0, share
        while longest:
            unpredicted = spare - len(leading)
            count = min(longest, left, _whole_blocks(len(ids) - start - unpredicted))
            if count <= 0:
                break
            end = start + unpredicted + count
            cut = np.array([*leading, *ids[start:end]], dtype=np.int64)
            windows.append(Window(section.name, cut, spare - 1))
            start, left = end, left - count
        complete &= len(ids) - start <= BLOCK_TOKENS
    if sum(w.targets.size for w in windows) < MIN_BLOCKS * BLOCK_TOKENS:
        raise UsageError(
            f"too few tokens to measure: of {len(sections)} texts, with a context of {max_context} "
            f"tokens, less than {MIN_BLOCKS} times {BLOCK_TOKENS} neighbours can be scored.",
            "Give a longer text; some thousand words make the intervals narrow.",
        )
    return Windows(tuple(windows), complete)


def leading_ids(tokenizer: TextTokenizer) -> list[int]:
    """What the tokenizer puts before every text, such as a bos token."""
    plain = tokenizer.encode("a")
    whole = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def _whole_blocks(tokens: int) -> int:
    return max(0, tokens) // BLOCK_TOKENS * BLOCK_TOKENS
