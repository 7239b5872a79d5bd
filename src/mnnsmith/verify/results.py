"""What a verification found, as plain data: one JSON object, which gates and reports read.

Every number that a report shows stands here.  Divergences are in nats, errors without a unit are
relative.  Names of values and operators are those of the graph ("layer7/mlp/down").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

FORMAT = 1

T = TypeVar("T")

Status: TypeAlias = Literal["passed", "failed", "skipped"]
Severity: TypeAlias = Literal["error", "warning", "note"]
# In the order in which they run; each name is a field of `Figures` or has none.
CHECKS = (
    "files", "weights", "tokens", "template", "exact", "statistical", "layers", "ranges", "vision",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that a user should know.

    severity: an "error" makes its check fail.  where: a file, tensor, operator, layer or text.
    """

    severity: Severity
    where: str
    message: str
    hint: str | None = None


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a check returns: one line, what is worth telling, and its part of `Figures`."""

    summary: str
    figures: T
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class StoredWeight:
    """One matrix of the bundle against the original's.

    error: norm of the difference over the norm of the original.  steps: the largest difference in
    steps of its block (0.5 is what rounding may cost); None for floats.
    """

    operator: str
    tensor: str
    scheme: str
    role: str
    layer: int | None
    parameters: int
    stored_bytes: int
    error: float
    steps: float | None


@dataclass(frozen=True)
class WeightFigures:
    matrices: tuple[StoredWeight, ...]


@dataclass(frozen=True)
class TextFigures:
    """Texts on which a tokenizer or a template was compared, and how many differ.

    engine_different: of the engine's own code in the same comparison; an app that tokenizes or
    renders with the engine sees these.
    """

    texts: int
    different: int
    engine_different: int


@dataclass(frozen=True)
class ExactCase:
    """One run of the bundle against the reference with the bundle's own weights.

    name: "prompt", "split", "decode", "reuse" (after going back in the cache), "greedy".
    error: the largest difference of logits, over the reference's standard deviation; of "greedy",
    by how much the reference holds another token for better.  kl: the largest of all positions.
    """

    name: str
    tokens: int
    error: float
    kl: float
    passed: bool


@dataclass(frozen=True)
class ExactFigures:
    reference: str
    memory: str
    cases: tuple[ExactCase, ...]
    max_kl: float


@dataclass(frozen=True)
class Histogram:
    """counts[i] lie in edges[i] .. edges[i + 1]; the first and the last take all beyond."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class SectionFigures:
    """One part of the text, such as a language."""

    name: str
    tokens: int
    kl: float
    top1: float
    perplexity: float
    reference_perplexity: float


@dataclass(frozen=True)
class TokenScore:
    """One token of the sample text, as the two models foresaw it from what stood before.

    kl: between their distributions for this place.  best, reference_best: the texts of their best
    tokens.  loss, reference_loss: -log of the probability that they gave the token itself.
    """

    text: str
    kl: float
    best: str
    reference_best: str
    loss: float
    reference_loss: float


@dataclass(frozen=True)
class StatisticalFigures:
    """The bundle as shipped against the original at full precision.

    top1: how often the best token is the same; top5: how often the reference's best is among the
    bundle's five best.  loss_increase: mean of the bundle's loss minus the reference's, nats a
    token; perplexity_increase: exp of it, minus 1.
    block_kl, block_loss_increase, block_top1: means of `block_tokens` neighbouring tokens, from
    which intervals are computed and by which two runs on one text (text_sha256) are compared pair
    by pair.
    greedy: at which token each greedy answer leaves the reference's; None where it never did in
    greedy_tokens tokens.
    """

    reference: str
    text_sha256: str
    tokens: int
    block_tokens: int
    kl: Interval
    kl_median: float
    kl_p99: float
    kl_max: float
    top1: Interval
    top5: Interval
    perplexity: float
    reference_perplexity: float
    loss_increase: Interval
    perplexity_increase: Interval
    block_kl: tuple[float, ...]
    block_loss_increase: tuple[float, ...]
    block_top1: tuple[float, ...]
    kl_histogram: Histogram
    sections: tuple[SectionFigures, ...]
    greedy_tokens: int
    greedy: tuple[int | None, ...]
    sample: tuple[TokenScore, ...]


@dataclass(frozen=True)
class ValueDifference:
    """One value of the graph, in the bundle against the reference.

    kind: "residual", "attention", "mlp", or the kind of an operator inside a block.
    cosine: the least of all tokens.  error: norm of the difference over the reference's norm.
    snr_db: the same in decibels.  max_abs: the largest difference of one element.
    allowed: the largest `error` that the check takes for right; None where it only measures.
    """

    name: str
    layer: int | None
    kind: str
    cosine: float
    error: float
    snr_db: float
    max_abs: float
    reference_rms: float
    allowed: float | None


@dataclass(frozen=True)
class LayerFigures:
    """Residual stream, attention and MLP of every block, in the order of computation.

    exact: at `memory: high`, against the reference with the weights that the bundle stores: what
    differs is a fault.  shipped: with the bundle's own settings, against the original: what
    quantization costs.  first: the first of `exact` that differs by more than allowed; bisected:
    the operators of its block, if that was asked for.
    """

    reference: str
    tokens: int
    exact: tuple[ValueDifference, ...]
    shipped: tuple[ValueDifference, ...]
    first: str | None
    bisected: tuple[ValueDifference, ...]


@dataclass(frozen=True)
class ValueRange:
    """The largest magnitude of a value of the graph on the text, and where it stands."""

    name: str
    layer: int | None
    max_abs: float
    token: int
    channel: int


@dataclass(frozen=True)
class RangeFigures:
    """limit: the largest number of fp16.  values: the largest of every layer, in order."""

    tokens: int
    limit: float
    values: tuple[ValueRange, ...]


@dataclass(frozen=True)
class VisionFigures:
    """Of a model that sees.

    pictures, pictures_different: pictures and prompts that were compared with another processor,
    and what differs.  exact, shipped, first, bisected: of the tower and the connector, as
    `LayerFigures` has them of the text; `layer` is -1 for the embeddings of patches.
    tiles: how many were compared so.  cases: logits after pictures at `memory: high` ("one
    picture", "two pictures", "split", "decode"); max_kl: the largest of them.
    kl, top1: of the text after pictures, as shipped against the original; None where nothing was
    compared.  text_tokens: how many.
    """

    reference: str
    pictures: int
    pictures_different: int
    tiles: int
    exact: tuple[ValueDifference, ...]
    shipped: tuple[ValueDifference, ...]
    first: str | None
    bisected: tuple[ValueDifference, ...]
    cases: tuple[ExactCase, ...]
    max_kl: float
    kl: Interval | None
    top1: Interval | None
    text_tokens: int


@dataclass(frozen=True)
class Figures:
    """The numbers of all checks that ran."""

    weights: WeightFigures | None = None
    tokens: TextFigures | None = None
    template: TextFigures | None = None
    exact: ExactFigures | None = None
    statistical: StatisticalFigures | None = None
    layers: LayerFigures | None = None
    ranges: RangeFigures | None = None
    vision: VisionFigures | None = None


@dataclass(frozen=True)
class Check:
    """One check: how it ended, in one line what it found, and everything worth telling."""

    name: str
    status: Status
    summary: str
    seconds: float
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Gate:
    """What a user asked for: "max-kl", "min-top1", "max-ppl-increase", "baseline KL", ..."""

    name: str
    limit: str
    found: str
    passed: bool


@dataclass(frozen=True)
class Subject:
    """What was verified, against what, and where.

    files: sha256 of the bundle's files.  settings: the engine's memory, precision, threads, ... of
    the statistical check.  device: "local", "arm64:cortex-a76", "ssh:host".
    """

    bundle: str
    model_type: str
    recipe: str
    source: str
    source_revision: str | None
    files: dict[str, str]
    device: str
    settings: dict[str, str]


@dataclass(frozen=True)
class Verification:
    """The whole result; `passed` is the verdict, `verdict` says what it leaves open, too."""

    format: int
    mnnsmith: str
    engine: str
    date: str
    level: str
    seconds: float
    subject: Subject
    checks: tuple[Check, ...]
    gates: tuple[Gate, ...]
    figures: Figures

    @property
    def passed(self) -> bool:
        """Whether no check failed and every gate holds."""
        return all(c.status != "failed" for c in self.checks) and all(g.passed for g in self.gates)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Checks that could not run: what they prove is not known."""
        return tuple(check.name for check in self.checks if check.status == "skipped")

    @property
    def verdict(self) -> str:
        """ "passed", or "passed, 2 checks skipped: exact, layers"; the same with "failed"."""
        word = "passed" if self.passed else "failed"
        if not self.skipped:
            return word
        count = len(self.skipped)
        noun = "check" if count == 1 else "checks"
        return f"{word}, {count} {noun} skipped: {', '.join(self.skipped)}"
