"""`python -m cluster pages`: makes anew what is made of other files of the repository; `--check` only compares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster.pages.chart_pages import README, SCHEMA, plain_manifests, readme, schema
from cluster.pages.control_page import PAGE, control_page
from cluster.pages.dashboards import dashboards
from cluster.pages.drawings import pictures
from cluster.pages.helm import program
from cluster.pages.logs_page import logs_page
from cluster.pages.metrics_page import metrics_page
from cluster.processes.children import ROOT


def manifests() -> Mapping[Path, str]:
    return plain_manifests() if program("helm") else {}


MAKERS: Sequence[Callable[[], Mapping[Path, str]]] = (
    lambda: {SCHEMA: schema(), README: readme()},
    manifests,  # Helm reads the schema
    metrics_page,
    dashboards,
    logs_page,
    lambda: {PAGE: control_page()},
    pictures,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Code 1 if `--check` finds one that is not current. Without Helm nothing is compared with it."""
    parser = argparse.ArgumentParser(prog="python -m cluster pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; code 1 if a file is not current")
    options = parser.parse_args(argv)
    if not program("helm"):
        sys.stderr.write("helm is not here (make helm): deploy/kubernetes stays as it is\n")
    stale = 0
    for make in MAKERS:
        for path, text in make().items():
            if path.exists() and path.read_text() == text:
                continue
            stale += 1
            print(f"{'not current' if options.check else 'written'}: {path.relative_to(ROOT)}")
            if not options.check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    return int(options.check and stale > 0)
