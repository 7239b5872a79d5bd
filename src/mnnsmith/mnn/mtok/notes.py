"""What the translation has to say: what it wrote in another form, and what will differ."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Notes:
    """Collected while a tokenizer is translated.

    rewritten: parts written in another form that gives the same ids.
    differences: texts for which the engine's ids or decoded text will differ from the library's.
    """

    rewritten: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def rewrote(self, text: str) -> None:
        if text not in self.rewritten:
            self.rewritten.append(text)

    def differs(self, text: str) -> None:
        if text not in self.differences:
            self.differences.append(text)
