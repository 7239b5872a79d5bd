"""Models on the Hugging Face hub: only the files we need, through the hub's own resumable cache."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mnnsmith.errors import MissingResourceError, SourceError, UnsupportedError

_SMALL_FILES = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "additional_chat_templates/*.jinja",
    "model.safetensors.index.json",
)
# Not *.safetensors: some repositories hold the weights a second time under another name.
_WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# Small files of a trainer, which say nothing about the weights.
_NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "adapter_model.bin")


@dataclass(frozen=True)
class Fetched:
    """A snapshot in the local cache, and the commit it is of."""

    folder: Path
    commit: str


def fetch(repository: str, *, revision: str | None, offline: bool, weights: bool) -> Fetched:
    """Bring the small files, and with `weights` the safetensors too, into the hub's cache.

    Respects the hub's environment (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT).  A download
    that was cut off goes on where it stopped.

    Raises `UnsupportedError` for a repository without safetensors, naming what it has, before
    anything is fetched; `SourceError` and `MissingResourceError` for what the hub refuses.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    local_only = offline or bool(constants.HF_HUB_OFFLINE)
    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        if not (local_only or weights):
            _check_files(repository, HfApi().list_repo_files(repository, revision=revision))
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, local_files_only=local_only
        )
    except errors.GatedRepoError as error:
        raise SourceError(
            f"{repository}: access to this model is restricted.",
            "Ask for access on its hub page, then set HF_TOKEN or run `hf auth login`.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{repository}: there is no revision {revision!r}.") from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"{repository}: there is no such model on the hub, or it is private.",
            "Check the spelling; for a private model set HF_TOKEN.",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if local_only:
            raise MissingResourceError(
                f"{repository}: not whole in the local cache, and offline mode is on.",
                "Run once without --offline (and without HF_HUB_OFFLINE) to fetch it.",
            ) from error
        raise _unreachable(repository, error) from error
    except errors.HFValidationError as error:
        raise SourceError(f"{repository}: not a valid hub id: {error}") from error
    except _transport_errors() as error:
        raise _unreachable(repository, error) from error
    path = Path(folder)
    return Fetched(path, path.name)


def _check_files(repository: str, names: Sequence[str]) -> None:
    """Refuse a repository whose weights are in no form that we read, by the names of its files.

    An adapter, or one that is no model at all, is told by its small files.
    """
    if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in _WEIGHT_FILES):
        return
    pickles = sorted(
        name
        for name in names
        if "/" not in name and name.endswith(_PICKLED) and name not in _NO_WEIGHTS
    )
    if pickles:
        raise UnsupportedError(
            f"{repository}: the weights are pickled ({pickles[0]}); loading a pickle runs code in "
            "it.",
            "Take a revision with safetensors (often `refs/pr/N`), or resave the model with "
            "`model.save_pretrained(folder, safe_serialization=True)`.",
        )
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        raise UnsupportedError(
            f"{repository}: holds GGUF files, no safetensors ({ggufs[0]}).",
            f"Fetch the one to convert (`hf download {repository} {ggufs[0]}`) and give its path.",
        )


def _transport_errors() -> tuple[type[Exception], ...]:
    """The hub's own, and what it lets through of the library below, which differs by version."""
    from huggingface_hub import errors

    below = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return (errors.HfHubHTTPError, OSError, *(module.HTTPError for module in below))


def _unreachable(repository: str, error: Exception) -> MissingResourceError:
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return MissingResourceError(
        f"{repository}: could not be downloaded: {first_line}",
        "Run the same command again: it goes on where it stopped.",
    )
