"""Hostile input: whatever a file holds, it is read or refused with our error, soon."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuzz_targets
from mnnsmith.api import Engine
from mnnsmith.errors import EngineError, MnnsmithError, TemplateError
from tiny_bundle import TinyLlama

# Of each target.
QUICK, MANY = 25, 1000


def run_child(count: int, *names: str) -> str:
    """The child limits its memory and the time of every input; see `fuzz_targets`."""
    done = subprocess.run(
        [sys.executable, fuzz_targets.__file__, str(count), *names],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-6000:]}"
    return done.stdout


def test_a_few_hostile_inputs_of_each_kind() -> None:
    total = run_child(QUICK).splitlines()[-1]
    assert int(total.removeprefix("total: ")) >= 0.9 * QUICK * len(fuzz_targets.TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_many_hostile_inputs(name: str) -> None:
    total = run_child(MANY, name).splitlines()[-1]
    assert int(total.removeprefix("total: ")) >= 0.9 * MANY


def test_the_harness_sees_what_it_must_see(tmp_path: Path) -> None:
    """A target that crashes, hangs or eats memory fails; else the tests above prove nothing."""
    for body in ("raise KeyError('x')", "while True: pass", "bytearray(1 << 33)"):
        code = (
            "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
            "import fuzz_targets as f, hypothesis.strategies as st\n"
            f"def bad(shop):\n    def read(_):\n        {body}\n    return read\n"
            "f.SECONDS_PER_INPUT = 0.2\n"
            "f.TARGETS['bad'] = (bad, st.none())\n"
            "f.Workshop.__init__ = lambda self, root: None\n"
            "raise SystemExit(f.main(['', '1', 'bad']))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(Path(fuzz_targets.__file__).parent)],
            capture_output=True, text=True, timeout=60, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode != 0, body


@pytest.mark.slow
@pytest.mark.engine
def test_the_engine_refuses_hostile_bundles(
    tiny_bundle: tuple[Path, TinyLlama], tmp_path: Path
) -> None:
    """The engine runs in a child; what it makes of a bundle's configuration must not be a hang."""
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle[0], folder)
    originals = {name: (folder / name).read_bytes() for name in ("llm_config.json", "config.json")}

    @settings(max_examples=60, derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.sampled_from(sorted(originals)), fuzz_targets.edits)
    def check(name: str, edits: list[tuple[str, int, object]]) -> None:
        document = fuzz_targets.mutated(json.loads(originals[name]), edits)
        (folder / name).write_bytes(fuzz_targets.as_json(document))
        start = time.monotonic()
        try:
            with Engine(folder, load_timeout_s=20, call_timeout_s=20) as engine:
                engine.forward([1, 2, 3])
        except EngineError as error:
            assert "no sign of life" not in str(error)
        except MnnsmithError:
            pass
        finally:
            (folder / name).write_bytes(originals[name])
        assert time.monotonic() - start < 20

    check()


@pytest.mark.slow
@pytest.mark.engine
def test_verification_survives_damaged_graphs(tmp_path: Path) -> None:
    """A graph that the engine's converter still reads, or not: findings or an error of ours."""
    from mnnsmith.api import convert
    from mnnsmith.verify.checks.weights import check_weights
    from verify_samples import RECIPE, context, write_model

    write_model(tmp_path / "model")
    folder = convert(tmp_path / "model", tmp_path / "bundle", recipe=RECIPE).path
    sound = (folder / "llm.mnn").read_bytes()
    chosen = random.Random(7)
    kinds = ("flip", "flip", "flip", "cut", "insert")
    for _ in range(250):
        changes = [
            (chosen.randrange(len(sound)), chosen.choice((0, 1, 127, 128, 255)),
             chosen.choice(kinds))
            for _ in range(chosen.choice((1, 1, 2, 4)))
        ]  # fmt: skip
        (folder / "llm.mnn").write_bytes(fuzz_targets.damaged(sound, changes))
        start = time.monotonic()
        try:
            check_weights(context(folder, tmp_path / "model"))
        except MnnsmithError as error:
            assert str(error).strip()
        assert time.monotonic() - start < 20, changes
    (folder / "llm.mnn").write_bytes(sound)
    assert not check_weights(context(folder, tmp_path / "model")).findings


TEMPLATE_PARTS = (
    "{{ 'x' * 1000000000 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ messages }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "{{ ''.__class__.__mro__ }}",
    "{% include 'x' %}", "{% import '/etc/passwd' as x %}", "{{ 10 ** 10 ** 7 }}", "{%", "{{", "#}",
    "{% set ns = namespace(a=1) %}{% set ns.a = ns.a * 2 %}", "{{ raise_exception('no') }}",
    "{{ messages[0]['content'][10**9] }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}", "\ud800", "\0",
    "{{ [1] * 100000000 }}", "{{ 'a' | center(1000000000) }}", "{{ lipsum(100000) }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ strftime_now('%' * 100000) }}",
    "{% if a %}" * 300, "((" * 2000, "{{ (" + "(" * 3000 + "}}", "{{ messages | tojson }}",
)  # fmt: skip


@pytest.mark.slow
def test_hostile_chat_templates() -> None:
    from mnnsmith.text.template import ChatTemplate

    messages = [{"role": "user", "content": "hello"}]

    @settings(max_examples=100, derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.lists(st.sampled_from(TEMPLATE_PARTS), min_size=1, max_size=3).map("".join))
    def check(source: str) -> None:
        start = time.monotonic()
        try:
            with ChatTemplate(source, "<s>", "</s>", time_limit_s=1.0) as template:
                template.render(messages)
        except TemplateError:
            pass
        # Two starts of a child and the limit, on a machine that has other work.
        assert time.monotonic() - start < 30

    check()
