"""The `pre_tokenizer` of a tokenizer.json as the engine's steps."""

from __future__ import annotations

from mnnsmith.errors import TokenizerError
from mnnsmith.mnn.mtok import form
from mnnsmith.mnn.mtok.notes import Notes
from mnnsmith.mnn.mtok.pattern_tree import ALL, Chars, Pattern, Repeat, literal, parse
from mnnsmith.mnn.mtok.patterns import engine_pattern
from mnnsmith.mnn.mtok.spec import Node

# Every space starts a part.
SPLIT_AT_SPACES = form.Split(" [^ ]*|[^ ]+", False, form.Behavior.ISOLATED)
# ASCII and other punctuation: Rust counts ASCII symbols in.
_PUNCTUATION = r"[\p{P}$+<=>^`|~]"
# Each step may cost a second here, and time for every text in the engine.
MAX_STEPS = 16
_BEHAVIORS = ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext")


def translate(node: Node | None, chat: bool, notes: Notes) -> list[form.PreTokenizer]:
    """The engine's steps, in order.  chat: texts are dialogues that start with an added token."""
    leaves = flatten(node)
    if node is not None and len(leaves) > MAX_STEPS:
        raise node.fail(f"{len(leaves)} pre-tokenizers; at most {MAX_STEPS} are expected.")
    return [step for leaf in leaves for step in _one(leaf, chat, notes)]


def flatten(node: Node | None) -> list[Node]:
    """The parts of a pre-tokenizer in order."""
    if node is None:
        return []
    if node.type != "Sequence":
        return [node]
    return [leaf for child in node.children("pretokenizers") for leaf in flatten(child)]


def _one(node: Node, chat: bool, notes: Notes) -> list[form.PreTokenizer]:
    match node.type:
        case "ByteLevel":
            return _byte_level(node, notes)
        case "Digits":
            single = node.flag("individual_digits", False)
            notes.rewrote("Digits: as a Split at \\p{N}")
            pattern = r"\p{N}" if single else r"\p{N}+"
            return [form.Split(pattern, False, form.Behavior.ISOLATED)]
        case "Split":
            return [_split(node, notes)]
        case "Metaspace":
            return _metaspace(node, chat, notes)
        case "BertPreTokenizer":
            return [form.BertPreTokenizer()]
        case "Punctuation":
            behavior = node.text("behavior", "Isolated")
            notes.rewrote("Punctuation: as a Split")
            return [_with_behavior(node, parse(_PUNCTUATION), False, behavior, notes)]
        case "WhitespaceSplit":
            notes.rewrote("WhitespaceSplit: as a Split")
            return [form.Split(r"\s", False, form.Behavior.REMOVED)]
        case "CharDelimiterSplit":
            delimiter = node.text("delimiter")
            if len(delimiter) != 1:
                raise node.fail("delimiter must be one character.")
            notes.rewrote("CharDelimiterSplit: as a Split")
            return [_with_behavior(node, literal(delimiter), False, "Removed", notes)]
        case kind:
            raise node.refuse(f"the pre-tokenizer {kind}")


def _byte_level(node: Node, notes: Notes) -> list[form.PreTokenizer]:
    steps: list[form.PreTokenizer] = []
    if node.flag("add_prefix_space", True):
        steps.append(form.Metaspace(" ", True))
        notes.rewrote("ByteLevel with add_prefix_space: behind a Metaspace that adds the space")
    return [*steps, form.ByteLevel(node.flag("use_regex", True))]


def _split(node: Node, notes: Notes) -> form.Split:
    pattern = node.need_child("pattern")
    if pattern.has("String"):
        tree = literal(pattern.text("String"))
        if not tree.source:
            raise node.fail("the pattern of Split is empty.")
    else:
        tree = parse(pattern.text("Regex"))
    return _with_behavior(
        node, tree, node.flag("invert", False), node.text("behavior", "Isolated"), notes
    )


def _with_behavior(
    node: Node, tree: Pattern, invert: bool, behavior: str, notes: Notes
) -> form.Split:
    """The engine isolates or removes; the rest is said in the pattern."""
    if behavior not in _BEHAVIORS:
        raise node.fail(f"behavior must be one of {', '.join(_BEHAVIORS)}, not {behavior!r}.")
    if behavior in ("Isolated", "Removed"):
        changed = tree
    elif invert:
        raise node.refuse(f"a Split with {behavior} and invert")
    else:
        changed = _reshaped(node, tree, behavior)
        notes.rewrote(f"Split with {behavior}: in the pattern itself")
    try:
        text, wide = engine_pattern(changed)
    except TokenizerError as error:
        raise node.fail(error.message, error.hint) from error
    if wide:
        notes.rewrote(f"Split at {tree.source[:60]!r}: with its sets of characters spelled out")
        notes.differs(
            "a run of some ten thousand characters that one wide pattern matches may end the app"
        )
    elif text != tree.source:
        notes.rewrote(f"Split at {tree.source[:60]!r}: as {text[:60]!r}")
    kind = form.Behavior.REMOVED if behavior == "Removed" else form.Behavior.ISOLATED
    return form.Split(text, invert and kind is form.Behavior.REMOVED, kind)


def _reshaped(node: Node, tree: Pattern, behavior: str) -> Pattern:
    """For a pattern that is one set of characters, or a run of it."""
    part = tree.branches[0][0] if len(tree.branches) == 1 and len(tree.branches[0]) == 1 else None
    if (
        part is None
        or not isinstance(part.atom, Chars)
        or part.low != 1
        or part.high not in (1, None)
    ):
        raise node.refuse(f"a Split at {tree.source[:60]!r} with {behavior}")
    other = Repeat(_inverse(part.atom), 1, None)
    some = Repeat(other.atom, 0, None)
    branches = {
        "Contiguous": ((Repeat(part.atom, 1, None),),),
        "MergedWithPrevious": ((some, part), (other,)),
        "MergedWithNext": ((part, some), (other,)),
    }[behavior]
    return Pattern(tree.source, branches, False)


def _inverse(chars: Chars) -> Chars:
    return Chars(f"[^{chars.source}]", None if chars.cells is None else ALL - chars.cells)


def _metaspace(node: Node, chat: bool, notes: Notes) -> list[form.PreTokenizer]:
    replacement = node.text("replacement")
    if len(replacement) != 1:
        raise node.fail("replacement must be one character.")
    scheme = node.text(
        "prepend_scheme", "always" if node.flag("add_prefix_space", True) else "never"
    )
    if scheme not in ("always", "never", "first"):
        raise node.fail(f"prepend_scheme must be always, never or first, not {scheme!r}.")
    if scheme == "first":
        notes.differs(
            "text before the first added token gets no U+2581 in front (prepend_scheme first)"
            if chat
            else "text behind an added token gets a U+2581 in front (prepend_scheme first)"
        )
    prefix = scheme == "always" or (scheme == "first" and not chat)
    steps: list[form.PreTokenizer] = [form.Metaspace(replacement, prefix)]
    if node.flag("split", True):
        steps.insert(0, SPLIT_AT_SPACES)
    return steps
