"""A feature of each kind touches few files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsed_changes import ROOT, Rehearsal, rehearsals

NAMES = [each.path.stem for each in rehearsals()]
UNNEEDED = shutil.ignore_patterns(".*", "__pycache__", "results", "*.html")


@pytest.mark.parametrize("rehearsal", rehearsals(), ids=NAMES)
def test_a_change_of_this_kind_touches_no_more_files_than_it_may(rehearsal: Rehearsal) -> None:
    assert 0 < len(rehearsal.touched) <= rehearsal.most


@pytest.mark.parametrize("rehearsal", rehearsals(), ids=NAMES)
def test_the_change_still_fits_this_tree(rehearsal: Rehearsal) -> None:
    assert rehearsal.apply(ROOT, "--check") == ""


@pytest.mark.slow
@pytest.mark.parametrize("rehearsal", rehearsals(), ids=NAMES)
def test_the_change_works(rehearsal: Rehearsal, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=UNNEEDED)
    assert rehearsal.apply(tree) == ""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *rehearsal.shown_by],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
