"""What deploy/ holds stays true."""

import tomllib
from pathlib import Path

from ranvier_py.config import load
from ranvier_py.reference import reference

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_the_annotated_configuration_is_the_one_that_the_program_prints() -> None:
    assert (DEPLOY / "ranvier.toml").read_text() == reference()


def test_the_annotated_configuration_can_be_loaded() -> None:
    config, _ = load({}, DEPLOY / "ranvier.toml")
    assert config.policy == "affinity"
    tomllib.loads((DEPLOY / "ranvier.toml").read_text())
