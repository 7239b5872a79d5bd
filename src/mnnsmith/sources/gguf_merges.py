"""The merges of a BPE vocabulary: as a GGUF file lists them, or recovered from scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mnnsmith.errors import TokenizerError
from mnnsmith.sources.gguf_file import MetadataArray

_LONGEST = 512  # characters; sentencepiece allows 16 unless told otherwise
# Real vocabularies of 256k pieces have some 600k merges and 2 million characters.
_MAX_MERGES = 1_000_000
_MAX_CHARS = 16_000_000


def listed_merges(origin: str, array: object, index: Mapping[str, int]) -> list[list[str]]:
    """Pairs from "left right" lines; TokenizerError where a part is not in the vocabulary."""
    if not isinstance(array, MetadataArray):
        raise TokenizerError(f"{origin}: holds no merges (tokenizer.ggml.merges).")
    if array.count > _MAX_MERGES:
        raise TokenizerError(
            f"{origin}: holds {array.count} merges; at most {_MAX_MERGES} are accepted."
        )
    out = []
    for number, line in enumerate(array.strings()):
        # The first character may itself be a space.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in index or right not in index or left + right not in index:
            raise TokenizerError(
                f"{origin}: merge {number}, {line!r:.80}, does not join two tokens of the "
                "vocabulary to a third."
            )
        out.append([left, right])
    return out


def merges_from_scores(
    origin: str, tokens: Sequence[str], normal: Sequence[bool], scores: Sequence[float]
) -> list[list[str]]:
    """The merges that sentencepiece's scores imply, best first.

    sentencepiece joins the two neighbours whose joint piece has the highest score, whatever the two
    are; so every way to cut a piece in two pieces is a merge with that piece's score.  Among equal
    scores longer parts come first, as in transformers' `generate_merges`.  Only normal pieces are
    joined: control, byte and unused ones must not arise from ordinary text.
    """
    index = {token: i for i, token in enumerate(tokens) if normal[i]}
    if sum(map(len, index)) > _MAX_CHARS:
        raise TokenizerError(f"{origin}: the tokens have more than {_MAX_CHARS} characters.")
    # Ids, not texts: the parts of few long tokens could fill the memory.
    found: list[tuple[float, int, int]] = []
    for token, i in index.items():
        if len(token) > _LONGEST:
            raise TokenizerError(
                f"{origin}: token {i} has {len(token)} characters; the limit is {_LONGEST}."
            )
        cuts = sorted(
            (index[token[:cut]], index[token[cut:]])
            for cut in range(1, len(token))
            if token[:cut] in index and token[cut:] in index
        )
        if len(found) + len(cuts) > _MAX_MERGES:
            raise TokenizerError(
                f"{origin}: the tokens can be cut into others of them in more than {_MAX_MERGES} "
                "ways; no tokenizer in use has so many merges."
            )
        found.extend((scores[i], left, right) for left, right in cuts)
    found.sort(key=lambda m: (m[0], len(tokens[m[1]]), len(tokens[m[2]])), reverse=True)
    return [[tokens[left], tokens[right]] for _, left, right in found]
