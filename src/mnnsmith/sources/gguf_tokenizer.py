"""A complete `tokenizer.json` from the metadata of a GGUF file.

`tokenizer.ggml.model` names one of four kinds: "gpt2" (byte-level BPE), "llama" (sentencepiece BPE,
whose merges are recovered from the scores), "t5" (Unigram) and "bert" (WordPiece).  The defaults of
missing keys are those of llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mnnsmith.errors import TokenizerError, UnsupportedError
from mnnsmith.sources.checkpoint import TokenizerFiles
from mnnsmith.sources.gguf_file import GgufFile, MetadataArray
from mnnsmith.sources.gguf_merges import listed_merges, merges_from_scores
from mnnsmith.sources.gguf_pretokenizers import PRE_TOKENIZERS

_SPACE = "\u2581"  # sentencepiece's mark of a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Texts of control tokens that end an answer; files often name only one of a model's in their keys.
_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>",
        "</s>", "<eos>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip
_SPECIAL_KEYS = (
    "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask",
    "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
)  # fmt: skip
# By the names that a chat template knows them by, with "_token" after them.
_TEMPLATE_NAMES = {
    "bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep", "padding": "pad",
    "mask": "mask",
}  # fmt: skip
_METASPACE_DECODER: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


@dataclass(frozen=True)
class Vocabulary:
    """The checked metadata of a tokenizer.

    tokens, types: by id; ids: of the keys `tokenizer.ggml.NAME_token_id`, by NAME.
    """

    origin: str
    metadata: Mapping[str, Any] = field(repr=False)
    tokens: list[str] = field(repr=False)
    types: list[int] = field(repr=False)
    ids: dict[str, int]

    def get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise TokenizerError(f"{self.origin}: tokenizer.ggml.{key} must be true or false.")
        return value

    def text(self, name: str) -> str | None:
        """The text of the token that `tokenizer.ggml.{name}_token_id` gives."""
        return self.tokens[self.ids[name]] if name in self.ids else None

    def index(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


@dataclass(frozen=True)
class _Built:
    """The parts of a tokenizer.json that differ between kinds.

    bos, eos: ids that are put around a text where the file does not say otherwise, or None.
    """

    model: dict[str, Any]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    decoder: dict[str, Any]
    add_bos: bool = False
    add_eos: bool = False
    notes: tuple[str, ...] = ()


def read_tokenizer(file: GgufFile) -> tuple[TokenizerFiles, tuple[str, ...]]:
    """The tokenizer of a GGUF model, and what to say about it.

    TokenizerError for damaged metadata; UnsupportedError for a kind that is not known.
    """
    origin = str(file.paths[0])
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise TokenizerError(
            f"{origin}: holds no tokenizer (no tokenizer.ggml.model).",
            "Take a GGUF file of the whole model.",
        )
    if not isinstance(kind, str) or kind not in _BUILDERS:
        raise UnsupportedError(
            f"{origin}: tokenizer.ggml.model is {kind!r:.40}, which is not supported.",
            f"Supported are: {', '.join(sorted(_BUILDERS))}.",
        )
    vocabulary = _vocabulary(file, kind)
    built = _BUILDERS[kind](vocabulary)
    notes = list(built.notes)
    added = _added_tokens(vocabulary, file.metadata.get("general.name"), notes)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": built.normalizer,
        "pre_tokenizer": built.pre_tokenizer,
        "post_processor": _post_processor(vocabulary, kind, built),
        "decoder": built.decoder,
        "model": built.model,
    }
    template = file.metadata.get("tokenizer.chat_template")
    files = TokenizerFiles(
        tokenizer_json=json.dumps(document, ensure_ascii=False),
        chat_template=template if isinstance(template, str) and template else None,
        bos_token=vocabulary.text("bos"),
        eos_token=vocabulary.text("eos"),
        stop_ids=_stop_ids(vocabulary),
        special_tokens={
            f"{name}_token": vocabulary.tokens[vocabulary.ids[key]]
            for key, name in _TEMPLATE_NAMES.items()
            if key in vocabulary.ids
        },
    )
    return files, tuple(notes)


_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "gpt2": {},
}


def _vocabulary(file: GgufFile, kind: str) -> Vocabulary:
    origin = str(file.paths[0])
    array = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(array, MetadataArray) or not array.count:
        raise TokenizerError(f"{origin}: holds no tokens (tokenizer.ggml.tokens).")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(array.strings())]
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise TokenizerError(f"{origin}: the token {twice!r:.60} is in the vocabulary twice.")
    ids = {name: value for name, value in _DEFAULT_IDS[kind].items() if value < len(tokens)}
    for name in _SPECIAL_KEYS:
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if type(value) is not int:
            raise TokenizerError(f"{origin}: tokenizer.ggml.{name}_token_id is {value!r:.40}.")
        if 0 <= value < len(tokens):
            ids[name] = value
        elif value not in (-1, 0xFFFFFFFF):  # both stand for "none"
            raise TokenizerError(
                f"{origin}: tokenizer.ggml.{name}_token_id is {value}; "
                f"there are {len(tokens)} tokens."
            )
    types = _types(origin, file, len(tokens), ids)
    return Vocabulary(origin, file.metadata, tokens, types, ids)


def _types(origin: str, file: GgufFile, count: int, ids: Mapping[str, int]) -> list[int]:
    array = file.metadata.get("tokenizer.ggml.token_type")
    if array is None:
        special = set(ids.values())
        return [CONTROL if i in special else NORMAL for i in range(count)]
    if not isinstance(array, MetadataArray):
        raise TokenizerError(f"{origin}: tokenizer.ggml.token_type is no array.")
    types = array.numbers()
    if len(types) != count or types.dtype.kind not in "iu":
        raise TokenizerError(
            f"{origin}: {count} tokens, but {len(types)} types of {types.dtype} for them."
        )
    return types.tolist()  # type: ignore[no-any-return]


def _added_tokens(
    vocabulary: Vocabulary, model_name: object, notes: list[str]
) -> list[dict[str, Any]]:
    """Tokens that are found in the text before anything else: control ones and user-defined ones.

    Phi-3's control tokens also take the white space after them; the file does not tell, so it is
    decided by the model's name, as llama.cpp does.
    """
    strip = isinstance(model_name, str) and any(
        name in model_name.lower() for name in ("phi-3", "phi3")
    )
    keep = {"<unk>", "<s>", "<|endoftext|>"}
    out = []
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            out.append(
                {
                    "id": i,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": strip and token not in keep,
                    "normalized": False,
                    "special": kind != USER_DEFINED,
                }
            )
    if strip:
        notes.append("Phi-3: white space after control tokens belongs to them.")
    return out


def _stop_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    named = [vocabulary.ids[name] for name in ("eos", "eot", "eom") if name in vocabulary.ids]
    by_text = [
        i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == CONTROL and token in _ENDS
    ]
    return tuple(dict.fromkeys(named + by_text))


def _post_processor(vocabulary: Vocabulary, kind: str, built: _Built) -> dict[str, Any] | None:
    last, key = ("seperator", "add_sep_token") if kind == "bert" else ("eos", "add_eos_token")
    around = []
    for name, wanted in (
        ("bos", vocabulary.flag("add_bos_token", built.add_bos)),
        (last, vocabulary.flag(key, built.add_eos)),
    ):
        if wanted and name not in vocabulary.ids:
            raise TokenizerError(
                f"{vocabulary.origin}: a token is to be added to each text, but "
                f"tokenizer.ggml.{name}_token_id does not say which."
            )
        around.append(name if wanted else None)
    if around == [None, None]:
        return None
    return _template(vocabulary, around[0], around[1])


def _template(vocabulary: Vocabulary, first: str | None, last: str | None) -> dict[str, Any]:
    def piece(name: str | None, segment: int) -> list[dict[str, Any]]:
        if name is None:
            return []
        return [{"SpecialToken": {"id": vocabulary.text(name), "type_id": segment}}]

    def around(sequence: str, segment: int) -> list[dict[str, Any]]:
        inner = {"Sequence": {"id": sequence, "type_id": segment}}
        return [*piece(first, segment), inner, *piece(last, segment)]

    used = {name: vocabulary.ids[name] for name in (first, last) if name is not None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            vocabulary.tokens[i]: {
                "id": vocabulary.tokens[i],
                "ids": [i],
                "tokens": [vocabulary.tokens[i]],
            }
            for i in used.values()
        },
    }


# ---------------------------------------------------------------------------------- the four kinds


def _byte_level(vocabulary: Vocabulary) -> _Built:
    name = vocabulary.get("pre")
    if name is None:
        raise UnsupportedError(
            f"{vocabulary.origin}: has no tokenizer.ggml.pre, so how text is cut is not known.",
            "The file was made before April 2024; take a newer one of the same model.",
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{vocabulary.origin}: tokenizer.ggml.pre is {name!r:.40}, which is not known.",
            f"Known are: {', '.join(sorted(PRE_TOKENIZERS))}.",
        )
    rules = PRE_TOKENIZERS[name]
    index = vocabulary.index()
    notes = (
        ("tokenizer.ggml.pre is 'default': llama.cpp's own rules.",) if name == "default" else ()
    )
    return _Built(
        _bpe_model(index, listed_merges(vocabulary.origin, vocabulary.get("merges"), index))
        | {"ignore_merges": rules.ignore_merges},
        {"type": "NFC"} if rules.nfc else None,
        rules.as_json(),
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        add_bos=rules.add_bos,
        notes=notes,
    )


def _bpe_model(index: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": index,
        "merges": merges,
    }


def _scores(vocabulary: Vocabulary) -> list[float]:
    array = vocabulary.get("scores")
    if not isinstance(array, MetadataArray):
        raise TokenizerError(f"{vocabulary.origin}: holds no scores (tokenizer.ggml.scores).")
    scores = array.numbers()
    if len(scores) != len(vocabulary.tokens) or not np.isfinite(scores).all():
        raise TokenizerError(
            f"{vocabulary.origin}: {len(vocabulary.tokens)} tokens need as many finite scores; "
            f"the file has {len(scores)}."
        )
    return [float(score) for score in scores]


def _refuse_normalization(vocabulary: Vocabulary) -> None:
    if vocabulary.flag("remove_extra_whitespaces", False):
        raise UnsupportedError(
            f"{vocabulary.origin}: a sentencepiece BPE that removes extra white space is not "
            "supported (tokenizer.ggml.remove_extra_whitespaces)."
        )
    charsmap = vocabulary.get("precompiled_charsmap")
    if isinstance(charsmap, MetadataArray) and charsmap.count:
        raise UnsupportedError(
            f"{vocabulary.origin}: a sentencepiece BPE with a character map is not supported."
        )


def _sentencepiece(vocabulary: Vocabulary) -> _Built:
    """sentencepiece BPE: spaces become marks, the text is one word, unknown bytes fall back."""
    _refuse_normalization(vocabulary)
    index = vocabulary.index()
    listed = vocabulary.get("merges")
    if listed is None:
        normal = [kind == NORMAL for kind in vocabulary.types]
        merges = merges_from_scores(
            vocabulary.origin, vocabulary.tokens, normal, _scores(vocabulary)
        )
    else:
        merges = listed_merges(vocabulary.origin, listed, index)
    prefix = vocabulary.flag("add_space_prefix", True)
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizer: dict[str, Any] = replace_spaces
    decoders: list[dict[str, Any]] = list(_METASPACE_DECODER)
    if prefix:
        steps = [{"type": "Prepend", "prepend": _SPACE}, replace_spaces]
        normalizer = {"type": "Sequence", "normalizers": steps}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe_model(index, merges) | {
        "unk_token": vocabulary.text("unknown"),
        "fuse_unk": True,
        "byte_fallback": BYTE in vocabulary.types,
    }
    decoder = {"type": "Sequence", "decoders": decoders}
    return _Built(model, normalizer, None, decoder, add_bos=True)


def _unigram(vocabulary: Vocabulary) -> _Built:
    """sentencepiece Unigram, as T5 has it."""
    if "unknown" not in vocabulary.ids:
        raise TokenizerError(f"{vocabulary.origin}: a Unigram vocabulary needs an unknown token.")
    steps: list[dict[str, Any]] = []
    charsmap = vocabulary.get("precompiled_charsmap")
    if isinstance(charsmap, MetadataArray) and charsmap.count:
        packed = charsmap.numbers().astype(np.uint8).tobytes()
        text = base64.b64encode(packed).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": text})
    if vocabulary.flag("remove_extra_whitespaces", False):
        # Spaces only: the Strip normalizer would also take what sentencepiece leaves.
        for pattern, content in (("^ +| +$", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    scheme = "always" if vocabulary.flag("add_space_prefix", False) else "never"
    metaspace = {"replacement": _SPACE, "prepend_scheme": scheme, "split": True}
    model = {
        "type": "Unigram",
        "unk_id": vocabulary.ids["unknown"],
        "vocab": [list(pair) for pair in zip(vocabulary.tokens, _scores(vocabulary), strict=True)],
        "byte_fallback": BYTE in vocabulary.types,
    }
    return _Built(
        model,
        {"type": "Sequence", "normalizers": steps} if steps else None,
        {"type": "Metaspace", **metaspace},
        {"type": "Metaspace", **metaspace},
        add_eos=True,
    )


def _wordpiece(vocabulary: Vocabulary) -> _Built:
    """BERT's WordPiece.  The file marks the start of words where BERT marks their continuation."""
    tokens = []
    for token in vocabulary.tokens:
        if token.startswith("[") and token.endswith("]"):
            tokens.append(token)
        else:
            tokens.append(token[1:] if token.startswith(_SPACE) else f"##{token}")
    renamed = replace(vocabulary, tokens=tokens)
    index = renamed.index()
    if len(index) < len(tokens):
        raise TokenizerError(f"{vocabulary.origin}: two tokens stand for the same word piece.")
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    model = {
        "type": "WordPiece",
        "unk_token": renamed.text("unknown") or "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": index,
    }
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": vocabulary.flag("normalizer.strip_accents", lowercase),
        "lowercase": lowercase,
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    return _Built(
        model, normalizer, {"type": "BertPreTokenizer"}, decoder, add_bos=True, add_eos=True
    )


_BUILDERS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "t5": _unigram,
    "bert": _wordpiece,
}
