"""A pre-tokenizer's regular expression, read into a tree.

The `tokenizers` library matches with Oniguruma.  The engine has a small matcher of its own that
reads some of this syntax otherwise, without a word.  So the pattern is parsed strictly here: what
is not known is refused by name, and every set of characters is understood.

A set of characters is described by cells: the 128 ASCII characters one by one, and seven classes of
all others (letter, number, mark, punctuation, symbol, white space, rest), because that is all that
the engine's matcher tells apart.  A set that cuts through a class has no cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from mnnsmith.errors import TokenizerError

Cell: TypeAlias = int | str
Cells: TypeAlias = frozenset[Cell]

CLASSES = "LNMPSZO"
ALL: Cells = frozenset([*range(128), *CLASSES])
_ASCII: dict[str, str] = {
    "L": "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
    "N": "0123456789",
    "M": "",
    "P": "!\"#%&'()*,-./:;?@[\\]_{}",
    "S": "$+<=>^`|~",
    "Z": "\t\n\v\f\r ",
}
PROPERTY_CELLS: dict[str, Cells] = {
    name: frozenset([*map(ord, chars), name]) for name, chars in _ASCII.items()
}
SPACE = PROPERTY_CELLS["Z"]
_CATEGORIES = frozenset(
    word
    for line in (
        "Lu Ll Lt Lm Lo LC Nd Nl No Mn Mc Me Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Z Zs Zl Zp",
        "C Cc Cf Cn Co Cs Han Hiragana Katakana Hangul Latin Cyrillic Greek Arabic Hebrew Thai",
        "Devanagari Bengali Tamil Telugu Armenian Georgian Ethiopic Khmer Lao Myanmar Tibetan",
    )
    for word in line.split()
)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_MAX_DEPTH = 32
_MAX_REPEAT = 1000
_MAX_CHARS = 20000


@dataclass(frozen=True)
class Chars:
    """One character out of a set. source: the set in Oniguruma's syntax."""

    source: str
    cells: Cells | None


@dataclass(frozen=True)
class NotAhead:
    """No text of `branches` may follow."""

    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Group:
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Repeat:
    """`atom`, `low` to `high` times (None: any number); possessive: what it took, it keeps."""

    atom: Chars | NotAhead | Group
    low: int
    high: int | None
    possessive: bool = False


Branch: TypeAlias = tuple[Repeat, ...]


@dataclass(frozen=True)
class Pattern:
    """plain: the engine reads the source as Oniguruma does."""

    source: str
    branches: tuple[Branch, ...]
    plain: bool


def parse(source: str) -> Pattern:
    """Raises TokenizerError, naming the construct, for what is not understood."""
    if len(source) > _MAX_CHARS:
        raise TokenizerError(f"A pre-tokenizer pattern of {len(source)} characters is too long.")
    parser = _Parser(source)
    branches = parser.alternatives(0)
    if parser.at < len(source):
        raise parser.refuse("an unopened )")
    return Pattern(source, branches, parser.plain)


def literal(text: str) -> Pattern:
    """The pattern that matches just this text."""
    branch = tuple(Repeat(_char(char, False), 1, 1) for char in text)
    return Pattern(text, (branch,), False)


def _char(char: str, ignore_case: bool) -> Chars:
    source = char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}"
    source = f"(?i:{source})" if ignore_case and char.isalpha() else source
    if not char.isascii():
        return Chars(source, None)
    both = {char.lower(), char.upper()} if ignore_case else {char}
    return Chars(source, frozenset(map(ord, both)))


class _Parser:
    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self.ignore_case = False
        self.plain = source.isascii()

    def refuse(self, what: str) -> TokenizerError:
        return TokenizerError(
            f"The pre-tokenizer pattern {self.source[:120]!r} has {what} at character {self.at}, "
            "which the engine's tokenizer format (.mtok) cannot express.",
            "docs/tokenizers.md lists the syntax that can be.",
        )

    def peek(self, text: str) -> bool:
        return self.source.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.source):
            raise self.refuse("an unfinished construct")
        self.at += 1
        return self.source[self.at - 1]

    def alternatives(self, depth: int) -> tuple[Branch, ...]:
        if depth > _MAX_DEPTH:
            raise self.refuse(f"groups more than {_MAX_DEPTH} deep")
        branches = [self.branch(depth)]
        while self.take("|"):
            branches.append(self.branch(depth))
        return tuple(branches)

    def branch(self, depth: int) -> Branch:
        parts: list[Repeat] = []
        while self.at < len(self.source) and not self.peek("|") and not self.peek(")"):
            if self.take("(?i)"):
                self.ignore_case = True
                self.plain = False
                continue
            parts.append(self.repeat(self.atom(depth)))
        return tuple(parts)

    def atom(self, depth: int) -> Chars | NotAhead | Group:
        if self.peek("["):
            return self.char_class()
        if self.take("("):
            return self.group(depth)
        if self.take("."):
            return Chars(".", ALL - {10})
        if self.take("$"):
            # The end, or a line feed ahead.
            self.plain = False
            return NotAhead(((Repeat(Chars(".", ALL - {10}), 1, 1),),))
        if self.take("\\"):
            return self.escape(in_class=False)
        char = self.next()
        if char in "^*+?{":
            self.at -= 1
            raise self.refuse(repr(char))
        return _char(char, self.ignore_case)

    def group(self, depth: int) -> NotAhead | Group:
        before = self.ignore_case
        ahead = wanted = False
        if self.take("?i:"):
            self.ignore_case = True
        elif self.take("?!"):
            ahead = True
        elif self.take("?="):
            ahead = wanted = True
            self.plain = False
        elif self.peek("?") and not self.take("?:"):
            raise self.refuse(f"the group ({self.source[self.at : self.at + 3]}")
        branches = self.alternatives(depth + 1)
        if not self.take(")"):
            raise self.refuse("an unclosed group")
        self.ignore_case = before
        if not ahead:
            return Group(branches)
        inner = NotAhead(branches)
        return NotAhead(((Repeat(inner, 1, 1),),)) if wanted else inner

    def repeat(self, atom: Chars | NotAhead | Group) -> Repeat:
        low, high = 1, 1
        bounds: tuple[int, int | None] = (low, high)
        counted = False
        if self.take("?"):
            bounds = (0, 1)
        elif self.take("*"):
            bounds = (0, None)
        elif self.take("+"):
            bounds = (1, None)
        elif self.take("{"):
            bounds = self.counts()
            counted = True
        else:
            return Repeat(atom, 1, 1)
        if isinstance(atom, NotAhead):
            raise self.refuse("a repeated lookahead")
        if self.peek("?"):
            raise self.refuse("a lazy quantifier")
        possessive = self.peek("+")
        if possessive:
            if counted:
                raise self.refuse("a repeated quantifier")
            self.at += 1
            self.plain = False
        if self.at < len(self.source) and self.source[self.at] in "*+?{":
            raise self.refuse("a repeated quantifier")
        return Repeat(atom, *bounds, possessive)

    def counts(self) -> tuple[int, int | None]:
        end = self.source.find("}", self.at)
        low, comma, high = self.source[self.at : max(end, self.at)].partition(",")
        numbers = [low] if not comma else [low, high] if high else [low]
        if end < 0 or not all(n.isascii() and n.isdigit() and len(n) < 6 for n in numbers):
            raise self.refuse("an odd {")
        bounds = (int(low), int(high) if high else None if comma else int(low))
        if max(int(n) for n in numbers) > _MAX_REPEAT or (bounds[1] or bounds[0]) < bounds[0]:
            raise self.refuse(f"a repetition outside 0 to {_MAX_REPEAT}")
        self.at = end + 1
        return bounds

    def escape(self, in_class: bool) -> Chars:
        """Behind a backslash."""
        start = self.at - 1
        kind = self.next()
        if kind in "pP":
            return self.property_set(start, kind == "P")
        if kind in "sSdDwW":
            cells = {"s": SPACE, "S": ALL - SPACE}.get(kind)
            return Chars("\\" + kind, cells)
        if kind in _CONTROL:
            self.plain = self.plain and kind in "nrtfv"
            return _char(_CONTROL[kind], False)
        if kind in "xu":
            return self.hex_char(kind)
        if kind.isalnum():
            self.at -= 2
            raise self.refuse(f"the escape \\{kind}")
        self.plain = self.plain and kind.isascii()
        return _char(kind, self.ignore_case and not in_class)

    def property_set(self, start: int, negated: bool) -> Chars:
        end = self.source.find("}", self.at)
        if not self.peek("{") or end < 0:
            raise self.refuse("an odd \\p")
        name = self.source[self.at + 1 : end]
        if name.startswith("^"):
            negated, name, self.plain = not negated, name[1:], False
        cells = None if name == "Z" else PROPERTY_CELLS.get(name)
        if cells is None and name not in _CATEGORIES:
            raise self.refuse(f"the property {name[:30]!r}")
        self.at = end + 1
        source = f"\\{'P' if negated else 'p'}{{{name}}}"
        return Chars(source, None if cells is None else ALL - cells if negated else cells)

    def hex_char(self, kind: str) -> Chars:
        """`\\x41`, `\\x{1F600}` or `\\u0041`; above U+007F the first would be a byte."""
        self.plain = False
        braces = kind == "x" and self.take("{")
        end = self.source.find("}", self.at) if braces else self.at + (2 if kind == "x" else 4)
        digits = self.source[self.at : max(end, self.at)]
        limit = 0x10FFFF if braces or kind == "u" else 0x7F
        hexadecimal = 0 < len(digits) < 8 and all(d in "0123456789abcdefABCDEF" for d in digits)
        value = int(digits, 16) if hexadecimal else -1
        if not 0 <= value <= limit or 0xD800 <= value < 0xE000:
            raise self.refuse("an odd hexadecimal escape")
        self.at = end + int(braces)
        return _char(chr(value), self.ignore_case)

    def char_class(self) -> Chars:
        start = self.at
        self.at += 1
        negated = self.take("^")
        members: Cells | None = frozenset()
        sources: list[str] = []
        if self.peek("]"):
            raise self.refuse("an empty class")
        while not self.take("]"):
            if self.peek("[") or self.peek("&&"):
                raise self.refuse("a class within a class")
            item = self.class_item()
            sources.append(item.source)
            members = None if members is None or item.cells is None else members | item.cells
        if members is not None and self.ignore_case:
            letters = [c for c in members if isinstance(c, int) and chr(c).isalpha()]
            members |= {ord(f(chr(c))) for c in letters for f in (str.lower, str.upper)}
        if members is not None and negated:
            members = ALL - members
        source = f"[{'^' if negated else ''}{''.join(sources)}]"
        if self.at - start > _MAX_CHARS:
            raise self.refuse("too long a class")
        return Chars(f"(?i:{source})" if self.ignore_case else source, members)

    def class_item(self) -> Chars:
        first, single = self.class_char()
        if not self.peek("-") or self.source[self.at + 1 : self.at + 2] in ("]", ""):
            return first
        self.at += 1
        last, also_single = self.class_char()
        if not single or not also_single or single > also_single:
            raise self.refuse("an odd range")
        if not (single.isalnum() and also_single.isalnum()):
            # The engine reads an escaped end of a range as a character of its own.
            self.plain = False
        source = f"{first.source}-{last.source}"
        if not also_single.isascii():
            return Chars(source, None)
        return Chars(source, frozenset(range(ord(single), ord(also_single) + 1)))

    def class_char(self) -> tuple[Chars, str]:
        """One item of a class, and its character if it is just one."""
        before = self.at
        ignore_case, self.ignore_case = self.ignore_case, False
        char = self.next()
        item = self.escape(in_class=True) if char == "\\" else _char(char, False)
        self.ignore_case = ignore_case
        text = self.source[before : self.at]
        if text[:2] in ("\\p", "\\P", "\\s", "\\S", "\\d", "\\D", "\\w", "\\W"):
            return item, ""
        if item.cells is not None and len(item.cells) == 1:
            return item, chr(next(c for c in item.cells if isinstance(c, int)))
        hexadecimal = item.source.removeprefix("\\x{").removesuffix("}")
        return item, chr(int(hexadecimal, 16))
