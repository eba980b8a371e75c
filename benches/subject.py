"""What measurements beside other servers have in common: our binary, and the vision model that is measured."""

import os
import subprocess
from pathlib import Path

BENCHES = Path(__file__).resolve().parent


def binary(args):
    """Our side: --binary, or else one that is built."""
    if args.binary:
        return args.binary.resolve()
    profile = [] if args.brief else ["--release"]
    subprocess.run(["cargo", "build", *profile, "--package", "triptych"], cwd=BENCHES.parent, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", BENCHES.parent / "target"))
    return target / ("debug" if args.brief else "release") / "triptych"


def model(args, cache):
    """The measured model with random weights, made once; a tiny one for --brief."""
    name = "qwen2-vl-tiny" if args.brief else "qwen2-vl-263m"
    directory = cache / name
    if not (directory / "done").exists():
        subprocess.run([args.python, BENCHES / "vllm/model.py", BENCHES / "models" / name, directory], check=True)
        (directory / "done").write_text("")
    return directory
