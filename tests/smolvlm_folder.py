"""The processor's files of SmolVLM, SmolVLM2 and Idefics3, as the hub has them, in a folder.

The ids of the special tokens are SmolVLM's own; its text tokens are SmolLM2's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

IMAGE_ID = 49190
FAKE_ID = 49189
GLOBAL_ID = 49152
END_OF_UTTERANCE_ID = 49279
VOCAB_SIZE = 49280

# Renders what SmolVLM's own template renders.
TEMPLATE = (
    "{{ '<|im_start|>' }}{% for message in messages %}{{ message.role | capitalize }}"
    "{{ ':' if message.content[0].type == 'image' else ': ' }}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<image>' if part.type == 'image' }}{% endfor %}"
    "{{ '<end_of_utterance>\n' }}{% endfor %}{{ 'Assistant:' if add_generation_prompt }}"
)
CLASSES = {
    "smolvlm": ("Idefics3Processor", "Idefics3ImageProcessor"),
    "idefics3": ("Idefics3Processor", "Idefics3ImageProcessor"),
    "smolvlm2": ("SmolVLMProcessor", "SmolVLMImageProcessor"),
}


def special_tokens() -> list[str]:
    """Of SmolVLM, from id 49152 on."""
    grid = [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
    named = ["<global-img>", *grid, "<fake_token_around_image>", "<image>"]
    unused = [f"<|reserved_special_token_{i}|>" for i in range(88)]
    return [*named, *unused, "<end_of_utterance>"]


def add_special_tokens(tokenizer_json: str) -> str:
    """A tokenizer.json with SmolVLM's tokens after its own."""
    spec = json.loads(tokenizer_json)
    known = {token["content"] for token in spec["added_tokens"]}
    ids = [*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"])]
    first = max(ids) + 1
    spec["added_tokens"] += [
        {
            "id": first + i, "content": text, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True,
        }
        for i, text in enumerate(special_tokens())
        if text not in known
    ]  # fmt: skip
    return json.dumps(spec)


def write_processor(
    folder: Path,
    tokenizer_json: str,
    *,
    kind: str = "smolvlm",
    tile: int = 512,
    longest_edge: int = 2048,
    image_seq_len: int = 64,
    split: bool = True,
    template_file: str = "chat_template.json",
    bos: str = "<|im_start|>",
    template: str = TEMPLATE,
) -> Path:
    """Write tokenizer.json, tokenizer_config.json, the processor's files and the chat template.

    tokenizer_json: with the special tokens (`add_special_tokens`).
    kind: smolvlm, smolvlm2 (with the keys for videos) or idefics3.
    template_file: which of the three places holds the template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    processor_class, image_class = CLASSES[kind]
    tokenizer: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": "<end_of_utterance>",
        "pad_token": "<|im_end|>" if bos == "<|im_start|>" else bos,
        "additional_special_tokens": [
            "<fake_token_around_image>", "<image>", "<end_of_utterance>",
        ],
        "processor_class": processor_class,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if template_file == "tokenizer_config.json":
        tokenizer["chat_template"] = template
    elif template_file == "chat_template.jinja":
        (folder / template_file).write_text(template, encoding="utf-8")
    else:
        _write(folder / template_file, {"chat_template": template})
    _write(folder / "tokenizer_config.json", tokenizer)
    _write(
        folder / "processor_config.json",
        {"image_seq_len": image_seq_len, "processor_class": processor_class},
    )
    pictures: dict[str, Any] = {
        "do_convert_rgb": True, "do_image_splitting": split, "do_normalize": True,
        "do_pad": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": image_class, "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": tile}, "processor_class": processor_class,
        "resample": 1, "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": longest_edge},
    }  # fmt: skip
    if kind == "smolvlm2":
        pictures["video_sampling"] = {
            "fps": 1, "max_frames": 64, "video_size": {"longest_edge": tile},
        }  # fmt: skip
    _write(folder / "preprocessor_config.json", pictures)
    return folder


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
