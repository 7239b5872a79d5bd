"""Every error a user can cause, as one tree.

    MnnsmithError            exit code 1   (root; never raised itself)
     +- UsageError                     2   an option or a combination of options is wrong
     |   +- RecipeError                2   a recipe does not parse, or does not fit the model
     +- SourceError                    3   a checkpoint file is missing, damaged or inconsistent
     |   +- TokenizerError             3   a tokenizer is damaged, or `.mtok` cannot express it
     |   +- TemplateError              3   a chat template is damaged, or refuses the dialogue
     +- UnsupportedError               4   a model type, operator or feature that we refuse by name
     +- ConversionError                5   the graph or the engine's converter failed
     +- BundleError                    6   a bundle is damaged or incomplete
     +- EngineError                    7   the engine failed, crashed or ran out of time
     |   +- ContextLengthError         7   prompt and answer do not fit the context
     +- MissingResourceError             8   disk full, a download failed, an extra is not installed
     +- VerificationError                9   a bundle differs from its original, or misses a gate

A message says what is wrong, where (file, tensor, layer), what was expected against what was found,
and what to do next.  Only the command line catches these and exits.
"""

from __future__ import annotations


class MnnsmithError(Exception):
    """Root of all errors that a user can cause.

    `message` says what, where, and expected against actual; `hint` says what to do next.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n{hint}")
        self.message = message
        self.hint = hint


class UsageError(MnnsmithError):
    """An option, or a combination of options, is wrong."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe does not parse, or does not fit the model it is applied to."""


class SourceError(MnnsmithError):
    """A checkpoint file is missing, damaged, or contradicts another."""

    exit_code = 3


class TokenizerError(SourceError):
    """A tokenizer is damaged, or holds a part that the engine's format cannot express."""


class TemplateError(SourceError):
    """A chat template is damaged, unsafe, or refuses the dialogue."""


class UnsupportedError(MnnsmithError):
    """A model type, operator, dtype or feature that we refuse by name."""

    exit_code = 4


class ConversionError(MnnsmithError):
    """The graph is inconsistent, or the engine's converter failed."""

    exit_code = 5


class BundleError(MnnsmithError):
    """A bundle is damaged, incomplete, or of an unknown version."""

    exit_code = 6


class EngineError(MnnsmithError):
    """The engine failed, crashed, or ran out of time."""

    exit_code = 7


class ContextLengthError(EngineError):
    """Prompt and answer do not fit into the bundle's context."""


class MissingResourceError(MnnsmithError):
    """The machine lacks something: disk space, a download, an optional package."""

    exit_code = 8


class VerificationError(MnnsmithError):
    """A bundle differs from its original where it must not, or misses a gate of the user."""

    exit_code = 9
