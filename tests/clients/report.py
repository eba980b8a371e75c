"""Checks of a client: each is a function whose name says what works; a failure is reported and does not end the others."""

import json
import os
import traceback
from importlib.metadata import version
from pathlib import Path

ROOT = Path(os.environ["TRIPTYCH_ROOT"])
HELDOUT = ROOT / "tests" / "models" / "heldout"

WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}


def check_weather(arguments: str | dict) -> None:
    """Holds arguments of a call against the schema of its tool."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert values["unit"] in ("celsius", "fahrenheit") and 1 <= values["days"] <= 5, values


def run(package: str | None, checks: list, client: str | None = None) -> None:
    """Runs the checks of a client and prints a line for each; without a package it has no version."""
    for check in checks:
        error = None
        try:
            check()
        except Exception as e:  # noqa: BLE001
            traceback.print_exc()
            error = f"{type(e).__name__}: {e}"[:400]
        name = check.__name__.replace("_", " ")
        row = {"client": client or package, "version": version(package) if package else "", "check": name, "error": error}
        print(json.dumps(row), flush=True)
