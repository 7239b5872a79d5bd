"""transformers' own processors, with Pillow, as what ours is compared with.

Its video processor cannot exist without torchvision; in its place stands a small one that chooses
frames by the original method and cuts them with the original picture processor, unsplit.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def load_processor(folder: Path, kind: str) -> Any:
    """`Idefics3Processor` or `SmolVLMProcessor` of a folder that `smolvlm_folder` wrote."""
    from transformers import AutoProcessor, AutoTokenizer, SmolVLMProcessor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    if kind != "smolvlm2":
        return AutoProcessor.from_pretrained(folder, backend="pil")

    class Processor(SmolVLMProcessor):
        """The original, with a video processor of any class."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return type(argument)
            return super().check_argument_for_proper_class(argument_name, argument)

    named = {
        **json.loads((folder / "processor_config.json").read_text()),
        **json.loads((folder / "chat_template.json").read_text()),
    }
    return Processor(
        SmolVLMImageProcessorPil.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        PillowVideos(SmolVLMImageProcessorPil.from_pretrained(folder)),
        image_seq_len=named["image_seq_len"],
        chat_template=named["chat_template"],
    )


class PillowVideos:
    """Does what `SmolVLMVideoProcessor` does, with Pillow's resize."""

    model_input_names = ("pixel_values",)
    valid_kwargs: Any = None

    def __init__(self, pictures: Any, fps: float = 1, num_frames: int = 64) -> None:
        from transformers.processing_utils import VideosKwargs

        self.valid_kwargs = VideosKwargs
        self.pictures, self.fps, self.num_frames = pictures, fps, num_frames

    def __call__(self, videos: Any, video_metadata: Any = None, **kwargs: Any) -> Any:
        from transformers import BatchFeature
        from transformers.video_utils import VideoMetadata, make_batched_metadata

        videos = videos if isinstance(videos, list) else [videos]
        while isinstance(videos[0], list):
            videos = videos[0]
        metadata: list[VideoMetadata] = make_batched_metadata(videos, video_metadata)
        taken = []
        for video, of_video in zip(videos, metadata, strict=True):
            indices = self.sample(of_video)
            of_video.frames_indices = indices
            taken.append(self.tiles(video[indices]))
        return BatchFeature({"pixel_values": np.stack(taken), "video_metadata": metadata})

    def sample(self, metadata: Any) -> Any:
        from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

        stub = SimpleNamespace(fps=self.fps, num_frames=self.num_frames)
        return SmolVLMVideoProcessor.sample_frames(stub, metadata)

    def tiles(self, frames: Any) -> Any:
        """float32 [n, 3, S, S]."""
        from PIL import Image

        images = [Image.fromarray(frame) for frame in frames]
        out = self.pictures([images], do_image_splitting=False, return_tensors="np")
        return out["pixel_values"][0]
