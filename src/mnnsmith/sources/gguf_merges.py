"""The merges of a BPE vocabulary: as a GGUF file lists them, or recovered from scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mnnsmith.errors import TokenizerError
from mnnsmith.sources.gguf_file import MetadataArray

_LONGEST = 512  # characters; sentencepiece allows 16 unless told otherwise


def listed_merges(origin: str, array: object, index: Mapping[str, int]) -> list[list[str]]:
    """Pairs from "left right" lines; TokenizerError where a part is not in the vocabulary."""
    if not isinstance(array, MetadataArray):
        raise TokenizerError(f"{origin}: holds no merges (tokenizer.ggml.merges).")
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
    found: list[tuple[float, str, str]] = []
    for token, i in index.items():
        if len(token) > _LONGEST:
            raise TokenizerError(
                f"{origin}: token {i} has {len(token)} characters; the limit is {_LONGEST}."
            )
        cuts = [
            (index[token[:cut]], index[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in index and token[cut:] in index
        ]
        found.extend((scores[i], token[:cut], token[cut:]) for _, _, cut in sorted(cuts))
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in found]
