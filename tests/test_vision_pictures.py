"""Every kind of picture through the session, beside transformers, in both profiles (minutes)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import picture_samples as samples
from mnnsmith.api import Engine, convert
from mnnsmith.session import AnswerOptions, open_session
from mnnsmith.vision.load import load_picture
from smolvlm_reference import load_processor
from test_session_vision import write_model
from test_vision_model import MAX_KL, kl

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.reference]
TOKENS = 16
MODES = ("rgb.jpeg", "gray.png", "rgba.png", "palette.png", "exif-6.jpeg", "gray16.png",
         "cmyk.jpeg", "one-bit.png", "animated.gif")  # fmt: skip


def pictures() -> dict[str, bytes]:
    """Files of all sizes and modes."""
    modes = samples.modes()
    sizes = {
        name: samples.encoded(Image.fromarray(samples.photo(*size)))
        for name, size in samples.SIZES.items()
    }
    return {**sizes, **{name: modes[name] for name in MODES}}


@pytest.mark.parametrize("profile", ["standard", "canvas"])
def test_every_picture_gives_what_transformers_gives(profile: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    folder = write_model(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = load_processor(folder, "smolvlm")
    bundle = convert(folder, tmp_path / "bundle", recipe="fp16", vision=profile)
    files = pictures()
    names = list(files)
    # Each alone, and each beside the next one.
    shown = [[name] for name in names] + [list(two) for two in pairwise(names)]
    options = AnswerOptions(max_tokens=TOKENS)
    with open_session(bundle, options=options, memory="high", precision="high") as session:
        session.stop_ids = frozenset()
        assert isinstance(session.engine, Engine)
        for group in shown:
            upright = [load_picture(files[name]).image for name in group]
            ids, logits, best = _original(processor, model, upright)
            parts = [{"type": "image", "image": files[name]} for name in group]
            dialogue = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
            made = session.prompt(dialogue)
            # A canvas has image tokens for what is between its tiles.
            same = [a == b or profile == "canvas" for a, b in zip(made.ids, ids, strict=True)]
            assert all(same), group
            session.engine.reset()
            actual = session.engine.forward(
                made.ids, all_positions=True, tiles=[run.tile for run in made.tiles]
            )
            last = max(run.stop for run in made.tiles)
            assert kl(logits[last:], actual[last:]).max() < MAX_KL, group
            if profile == "standard":
                assert kl(logits, actual).max() < MAX_KL, group
            reply = session.reply(dialogue)
            list(reply)
            assert list(reply.answer.token_ids) == best, group


def _original(
    processor: Any, model: Any, images: list[Image.Image]
) -> tuple[list[int], np.ndarray, list[int]]:
    """Ids of the prompt, its logits, and the best tokens after it."""
    import torch

    content = [{"type": "image", "image": image} for image in images]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [*content, {"type": "text", "text": "What?"}]}],
        add_generation_prompt=True, tokenize=True, return_dict=True,
        processor_kwargs={"return_tensors": "pt"},
    )  # fmt: skip
    ids, pixels = inputs["input_ids"], inputs["pixel_values"]
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values=pixels).logits[0].double().numpy()
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels,
            max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=1,
        )  # fmt: skip
    return ids[0].tolist(), logits, out[0, ids.shape[1] :].tolist()
