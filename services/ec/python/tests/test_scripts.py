"""The scripts that Redis runs are those of the Rust crate, letter for letter."""

from pathlib import Path

import pytest

from triptych_ec.stores import scripts

RUST = Path(__file__).parents[2] / "src" / "store" / "redis" / "scripts.rs"
NAMES = ["PUBLISH", "REMOVE_IF_SAME", "ACQUIRE", "RENEW", "RELEASE"]


@pytest.mark.parametrize("name", NAMES)
def a_script_is_that_of_the_rust_crate(name: str) -> None:
    assert f'const {name}: &str = "{getattr(scripts, name)}";' in RUST.read_text()
