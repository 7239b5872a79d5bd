"""Models on the Hugging Face hub: only the files we need, through the hub's own resumable cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from mnnsmith.errors import MissingResourceError, SourceError

_SMALL_FILES = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "model.safetensors.index.json",
)
# Not *.safetensors: some repositories hold the weights a second time under another name.
_WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors")


@dataclass(frozen=True)
class Fetched:
    """A snapshot in the local cache, and the commit it is of."""

    folder: Path
    commit: str


def fetch(repository: str, *, revision: str | None, offline: bool, weights: bool) -> Fetched:
    """Bring the small files, and with `weights` the safetensors too, into the hub's cache.

    Respects the hub's environment (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT).  A download
    that was cut off goes on where it stopped.
    """
    from huggingface_hub import constants, errors, snapshot_download

    local_only = offline or bool(constants.HF_HUB_OFFLINE)
    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
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
