"""`mnnsmith report`: from bundles and results to a page, and what it refuses."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mnnsmith.api import convert, open_bundle
from mnnsmith.bundle.manifest import VERIFICATION
from mnnsmith.cli.report import report
from mnnsmith.errors import BundleError, UsageError
from mnnsmith.selftest import write_tiny_checkpoint
from mnnsmith.verify.output.record import record
from mnnsmith.verify.output.results_json import to_json
from verification_samples import verification

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_tiny_checkpoint(folder / "model")
    convert(folder / "model", folder / "bundle", recipe="fp16")
    return folder / "bundle"


def test_results_and_bundles_in_their_order(bundle: Path, tmp_path: Path) -> None:
    verified, result = _verified(bundle, tmp_path / "verified"), tmp_path / "old.json"
    result.write_text(to_json(verification("older")), encoding="utf-8")
    report([result, verified], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 0 < page.index("older") < page.index("newer")


def test_what_it_refuses(bundle: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(UsageError, match="not verified yet"):
        report([bundle], page)
    with pytest.raises(BundleError, match="no such folder"):
        report([tmp_path / "nothing"], page)
    (tmp_path / "bad.json").write_text('{"format": 1}', encoding="utf-8")
    with pytest.raises(UsageError, match="missing"):
        report([tmp_path / "bad.json"], page)
    with pytest.raises(UsageError, match="is to be read"):
        report([tmp_path / "bad.json"], tmp_path / "bad.json")
    with pytest.raises(UsageError, match="is a folder"):
        report([tmp_path / "bad.json"], tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        report([tmp_path / "bad.json"], tmp_path / "none" / "page.html")
    verified = _verified(bundle, tmp_path / "verified")
    (tmp_path / "link").symlink_to(verified / "mnnsmith.json")
    for target in (verified / "mnnsmith.json", verified / VERIFICATION, tmp_path / "link"):
        before = target.read_bytes()
        with pytest.raises(UsageError, match="is to be read"):
            report([verified], target)
        assert target.read_bytes() == before
    for _ in range(2):
        report([verified], verified / "page.html")
    assert not page.exists()


def _verified(bundle: Path, copy: Path) -> Path:
    """A copy of the bundle with a result that is about its files."""
    shutil.copytree(bundle, copy)
    files = {name: digest for name, (digest, _) in open_bundle(copy).manifest.files.items()}
    made = verification("newer")
    record(open_bundle(copy), replace(made, subject=replace(made.subject, files=files)))
    return copy
