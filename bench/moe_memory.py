"""Memory of a mixture of experts with mapped weights, at load and after some tokens.

    python bench/moe_memory.py --work DIR [-o results.json]

The model is DeepSeek-V2 in shape (27 layers, 64 experts of which 6 are chosen, 2 shared) and small
in width, its weights random; only numpy is needed.  A random router spreads its choices evenly,
which is the worst case for mapping: a trained one, on one kind of text, leaves more experts idle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mnnsmith.api import Engine, convert

HIDDEN, INNER, EXPERT_INNER, LAYERS, EXPERTS, CHOSEN = 512, 1024, 256, 27, 64, 6
HEADS, RANK, NOPE, ROPE, VALUE, VOCAB = 8, 128, 64, 32, 64, 4096
RECIPE = "w4g64-head8"
CONFIG = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": EXPERT_INNER,
    "num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "kv_lora_rank": RANK, "q_lora_rank": None,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "topk_method": "greedy",
    "routed_scaling_factor": 1.0, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "float16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }

    def mlp(prefix: str, inner: int) -> None:
        found[f"{prefix}.gate_proj.weight"] = found[f"{prefix}.up_proj.weight"] = (inner, HIDDEN)
        found[f"{prefix}.down_proj.weight"] = (HIDDEN, inner)

    for i in range(LAYERS):
        p = f"model.layers.{i}"
        found[f"{p}.input_layernorm.weight"] = found[f"{p}.post_attention_layernorm.weight"] = (
            HIDDEN,
        )
        found[f"{p}.self_attn.q_proj.weight"] = (HEADS * (NOPE + ROPE), HIDDEN)
        found[f"{p}.self_attn.kv_a_proj_with_mqa.weight"] = (RANK + ROPE, HIDDEN)
        found[f"{p}.self_attn.kv_a_layernorm.weight"] = (RANK,)
        found[f"{p}.self_attn.kv_b_proj.weight"] = (HEADS * (NOPE + VALUE), RANK)
        found[f"{p}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * VALUE)
        if i == 0:
            mlp(f"{p}.mlp", INNER)
            continue
        found[f"{p}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        mlp(f"{p}.mlp.shared_experts", 2 * EXPERT_INNER)
        for j in range(EXPERTS):
            mlp(f"{p}.mlp.experts.{j}", EXPERT_INNER)
    return found


def write_checkpoint(folder: Path) -> None:
    """The checkpoint in fp16, tensor by tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes().items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes().items():
            values = random.standard_normal(shape, dtype=np.float32)
            if len(shape) == 1:
                values = 1 + 0.1 * values
            elif "mlp.gate." not in name and "embed" not in name:
                values *= shape[1] ** -0.5
            file.write(values.astype(np.float16).tobytes())


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE vocabulary without merges, filled up with unused tokens."""
    codes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(c) for c in codes] + [chr(256 + i) for i in range(256 - len(codes))]
    vocab = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(letters)}
    vocab |= {f"unused{i}": i for i in range(len(vocab), VOCAB)}
    special = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, text in enumerate(("<s>", "</s>"))
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )


def resident(engine: Engine) -> dict[str, int]:
    """Bytes of the engine's process in memory: of its own, and pages of mapped files (which the
    system takes back when memory is short)."""
    lines = Path(f"/proc/{engine.pid}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    kinds = {"own": "RssAnon", "mapped": "RssFile"}
    return {name: int(found[key].split()[0]) * 1024 for name, key in kinds.items()}


def run(bundle: Path, ids: list[int], config: dict[str, Any] | None) -> dict[str, Any]:
    """Load, run 1, 10 and 100 tokens one at a time; what is resident after each."""
    begin = time.perf_counter()
    with Engine(bundle, config=config) as engine:
        result: dict[str, Any] = {
            "state": engine.mapping.state,
            "load_s": round(time.perf_counter() - begin, 2),
            "loaded": resident(engine),
        }
        for count in (1, 10, 100):
            for i in ids[engine.position : count]:
                logits = engine.forward([i])
            result[f"after_{count}"] = resident(engine)
        rest = ids[engine.position :]
        begin = time.perf_counter()
        for i in rest:
            engine.forward([i])
        result["decode_tokens_per_s"] = round(len(rest) / (time.perf_counter() - begin), 1)
        result["checksum"] = float(np.abs(logits.astype(np.float64)).sum())
    return result


def drop_from_memory(folder: Path) -> None:
    """Have the system forget a folder's files, as they are after a restart."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for model and cache")
    parser.add_argument("-o", "--output", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    work: Path = options.work
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    checkpoint, bundle = work / "checkpoint", work / "bundle"
    if not (bundle / "mnnsmith.json").is_file():
        write_checkpoint(checkpoint)
        convert(checkpoint, bundle, recipe=RECIPE, force=True)
    random = np.random.default_rng(1)
    spread = random.integers(2, VOCAB, 160).tolist()
    # One passage over and over: few experts.
    narrow = (random.integers(2, VOCAB, 4).tolist() * 40)[:160]
    rows = {
        "in memory": run(bundle, spread, {"use_mmap": False}),
        "mapped, first load": run(bundle, spread, None),
    }
    for name, ids in (("mapped, any tokens", spread), ("mapped, 4 tokens repeated", narrow)):
        drop_from_memory(work / "cache")
        rows[name] = run(bundle, ids, None)
    cache = work / "cache" / "mnnsmith" / "mapped"
    report = {
        "weight_bytes": (bundle / "llm.mnn.weight").stat().st_size,
        "graph_bytes": (bundle / "llm.mnn").stat().st_size,
        "cache_bytes": sum(512 * p.stat().st_blocks for p in cache.rglob("*")),
        "recipe": RECIPE,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "versions": {name: version(name) for name in ("MNN", "numpy")},
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        ).stdout.strip(),
        "runs": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


def show(report: dict[str, Any]) -> None:
    for name in ("weight_bytes", "graph_bytes", "cache_bytes"):
        print(f"{name:14} {report[name] / 1e6:8.1f} MB")
    print(f"{'':28}{'load':>8}{'own + mapped MB: loaded':>26}{'1':>14}{'10':>14}{'100':>14}  t/s")
    for name, row in report["runs"].items():
        cells = [
            f"{row[k]['own'] / 1e6:.0f} + {row[k]['mapped'] / 1e6:.0f}"
            for k in ("loaded", "after_1", "after_10", "after_100")
        ]
        numbers = f"{cells[0]:>26}{cells[1]:>14}{cells[2]:>14}{cells[3]:>14}"
        print(f"{name:28}{row['load_s']:>6} s{numbers}  {row['decode_tokens_per_s']}")


if __name__ == "__main__":
    main()
