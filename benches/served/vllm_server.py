"""vLLM's server with packages of another environment behind its own: vllm_server.py SITE-PACKAGES FLAGS…

vLLM reads audio with packages that its environment need not have (`vllm[audio]`); that of faster-whisper has them.
"""

import runpy
import sys


def main():
    sys.path.append(sys.argv.pop(1))
    sys.argv[0] = "vllm"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
