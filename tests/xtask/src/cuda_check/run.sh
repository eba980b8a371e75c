#!/usr/bin/env bash
# Checks the CUDA back end on a device of this machine, from the folder of the checkout; needs no Rust:
#     bash .cuda-check/run.sh [--out DIR] [--seconds N] [--only PART,…] [--smoke]
set -eu
cd "$(dirname "$0")/.."
rm -rf .cuda-check/files
tar -xJf .cuda-check/files.tar.xz -C .cuda-check 2>/dev/null ||
    python3 -m tarfile -e .cuda-check/files.tar.xz .cuda-check
# Libraries that are installed and that the loader may not look for: the driver, and cuBLAS of CUDA 13, as part of a toolkit
# or of a Python package.
libraries=$(python3 - <<'PYTHON'
import glob
import os
import sys

places = ["/usr/local/nvidia/lib*", "/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu"]
places += [f"{path}/nvidia/*/lib" for path in sys.path if path.endswith("-packages")]
found = [[os.path.dirname(path) for place in places for path in glob.glob(f"{place}/{name}")][:1]
         for name in ["libcuda.so.1", "libcublasLt.so.13"]]
print(":".join(sum(found, [])))
PYTHON
)
if [ -n "$libraries" ]; then
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries"
fi
exec .cuda-check/files/bin/xtask cuda-check run "$@"
