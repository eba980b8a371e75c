"""The peers and this engine, in turn, in the same minutes: one table with ratios, as Markdown, JSON and a plot.

    python3 benches/peers/run.py                 # everything, into benches/results/peers.*
    python3 benches/peers/run.py whisper --rounds 5 --threads 2
    python3 benches/peers/run.py --smoke         # tiny shapes, one round: that it runs, not how fast; stores nothing

It makes its own environment under .cache/peers from requirements.txt (pinned packages, some GB with PyPI's torch), writes
models with the published shapes and random weights (what they say is noise, how fast they say it is not), and starts one
process for each measurement: peer, ours, peer, ours, round after round. Each peer runs with one thread and with all
(--peer-threads), and the better counts in each figure. Medians are compared, with the best peer of the row. Decode is told
twice: with the projection of cross-attention keys, and from the first token on, the steps alone. whisper.cpp is compiled
here, for the instructions of this machine. --tiny-en DIR adds the real Whisper tiny.en. Rows of a model are stored when they are
complete (10 to 25 minutes on two cores), beside what is stored of the others.

Peers: transformers on torch (f32, bf16), CTranslate2 (f32, int8), whisper.cpp (q8_0, q4_0); with --vllm, vLLM for the CPU
(f32, bf16) on Qwen2-VL, from an environment of its own under .cache/peers (some GB). Where there is a file for it,
preprocessing is timed too: 30 s of FLAC to log-mel features, a JPEG of 1920×1080 to patches.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import best
import table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".cache/peers"

#: Peers by model kind, as `rivals.py` knows them.
PEERS = {
    "whisper": ["torch-f32", "torch-bf16", "ctranslate2-f32", "ctranslate2-int8", "whispercpp-q8_0", "whispercpp-q4_0"],
    "seq2seq": ["torch-f32", "torch-bf16", "ctranslate2-f32", "ctranslate2-int8"],
    "vision": ["torch-f32", "torch-bf16", "vllm-f32", "vllm-bf16"],
}
OURS = ["ours-f32", "ours-bf16", "ours-int8", "ours-int4"]
MODELS = {key: name for name, key in table.KEYS.items()}
KINDS = {"whisper": "whisper", "t5": "seq2seq", "bart": "seq2seq", "qwen2vl": "vision"}
#: Beams of the search that is timed for kinds whose answers people search so: as many as faster-whisper takes by itself.
BEAMS = {"whisper": 5, "seq2seq": 5, "vision": 1}
#: Peers that can be held to an older instruction set, and what they read that from.
HELD = {"avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
                 "CT2_FORCE_CPU_ISA": "AVX2"}}
#: What packages that are compiled here are compiled with: whisper.cpp for this machine, as its own build does, and its libraries
#: found beside it, not in the folder that pip builds in.
NATIVE = "-DGGML_NATIVE=ON -DCMAKE_BUILD_RPATH=$ORIGIN"
#: What `models.py` writes: what a kind's encoder reads, and what its preprocessing is timed with.
ITEMS = {"whisper": "noise.wav", "vision": "noise.png"}
FILES = {"whisper": "audio.flac", "vision": "photo.jpg"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; all by default")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens that each sequence writes")
    parser.add_argument("--text-tokens", type=int, default=20, help="tokens of text behind the image, for vision models")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="runs inside a process, after one that does not count; the shortest counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer-threads", help="numbers of threads that each peer is tried with; 1 and --threads by default")
    parser.add_argument("--isa", choices=list(HELD), help="hold ours, torch and CTranslate2 to this instruction set, and leave "
                        "out peers that cannot be restricted; into benches/results/peers-ISA.*")
    parser.add_argument("--peers", help="only these, separated by commas; see PEERS in this file")
    parser.add_argument("--tiny-en", metavar="DIR", type=Path, help="the directory of the real Whisper tiny.en")
    parser.add_argument("--vllm", action="store_true", help="vLLM too, for vision models")
    parser.add_argument("--python", help="an environment that has the packages, instead of .cache/peers")
    parser.add_argument("--extra-index", metavar="URL", help="another index of packages: that of https://download.pytorch.org/whl/cpu "
                        "has torch without what it needs for GPUs")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="an environment that has vLLM, instead of .cache/peers")
    parser.add_argument("--binary", type=Path, help="a built `throughput`, instead of building one")
    parser.add_argument("--out", type=Path, default=ROOT / "benches/results")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.models = args.models or list(MODELS)
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}, there are {', '.join(MODELS)}")
    if args.smoke:
        args.rounds, args.repeats, args.batches, args.new_tokens = 1, 1, "1,2", 4
    args.batches = [int(b) for b in args.batches.split(",")]
    threads = args.peer_threads or f"1,{args.threads}"
    args.peer_threads = sorted({int(n) for n in threads.split(",")})
    args.n_tokens = 64 if args.smoke else 512
    return args


def environment(name, given, requirements, *options):
    """A Python that has what a list of requirements says."""
    if given:
        return given
    python, wanted = CACHE / name / "bin/python", (HERE / requirements).read_text() + f"# {NATIVE}\n"
    done = CACHE / name / "installed.txt"
    if not done.exists() or done.read_text() != wanted:
        print("installing the peers into", python.parent.parent, flush=True)
        # With the pip that is there: not every system has one to put into it.
        venv.create(CACHE / name, with_pip=False, clear=True)
        command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", *options,
                   "-r", HERE / requirements]
        subprocess.run(command, check=True, env={**os.environ, "CMAKE_ARGS": NATIVE})
        done.write_text(wanted)
    return str(python)


def programs(args):
    """What runs whom: our binary, a Python for each library that has one of its own, and under None that of all others."""
    index = ["--extra-index-url", args.extra_index] if args.extra_index else []
    found = {None: environment("venv", args.python, "requirements.txt", *index), "ours": binary(args)}
    if args.vllm:
        # All that it needs is in the list: what it asks for itself, PyPI has not.
        found["vllm"] = environment("vllm", args.vllm_python, "requirements-vllm.txt", "--no-deps")
    return found


def binary(args):
    """Our side."""
    if args.binary:
        return args.binary
    profile = ["--release"] if not args.smoke else []
    subprocess.run(["cargo", "build", *profile, "--package", "triptych-benches", "--bin", "throughput"], cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target / ("debug" if args.smoke else "release") / "throughput"


def measured(command, args, n_threads=None):
    """One process to its end: what it printed as JSON, and the most memory it held."""
    env = {**os.environ, "OMP_NUM_THREADS": str(n_threads or args.threads), "TOKENIZERS_PARALLELISM": "false",
           "STARTED_AT": repr(time.time()), **HELD.get(args.isa, {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True) as process:
        out, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{err[-2000:]}")
    return json.loads(out.strip().splitlines()[-1])


def models(args, python):
    """Directories by name, each with its kind; and the directory of what they read."""
    out = CACHE / ("smoke" if args.smoke else "models")
    out.mkdir(parents=True, exist_ok=True)
    command = [python, HERE / "models.py", out, *args.models] + (["--smoke"] if args.smoke else [])
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    found = {MODELS[name]: (out / name, KINDS[name]) for name in args.models}
    if args.tiny_en:
        found["Whisper tiny.en"] = (args.tiny_en, "whisper")
    return found, out


def peers(args, kind):
    """Those that are wanted, of a kind of model."""
    there = [who for who in PEERS[kind] if args.vllm or not who.startswith("vllm-")]
    if args.isa:
        there = [who for who in there if who.startswith(("torch-", "ctranslate2-"))]
    return [who for who in there if args.peers is None or who in args.peers.split(",")]


def commands(args, runs, directory, kind, items, batches):
    """What measures one model at some batch sizes: `{who: command}`, peers first."""
    common = ["--item", str(items / ITEMS[kind] if kind in ITEMS else args.n_tokens), "--batches", ",".join(map(str, batches)),
              "--new-tokens", str(args.new_tokens), "--repeats", str(args.repeats)]
    common += ["--beams", str(BEAMS[kind])] if batches is args.batches else []
    if kind == "vision":
        common += ["--text-tokens", str(args.text_tokens)]
    file = ["--preprocess", items / FILES[kind]] if kind in FILES else []
    found = {}
    for who in peers(args, kind):
        library = who.partition("-")[0]
        command = [runs.get(library, runs[None]), HERE / "rivals.py", who, directory, kind, *common]
        command += ["--smoke"] if args.smoke else []
        # The libraries that preprocess are those of the torch peers.
        found[who] = command + file if library == "torch" else command
    for who in OURS:
        found[who] = [runs["ours"], directory, "--precision", who.removeprefix("ours-"), "--packed", items / "packed", *common, *file]
        found[who] += ["--isa", args.isa] if args.isa else []
    return found


def of_threads(args, who, command):
    """One peer with each number of threads, or ours with all: the better of each figure, and which that was."""
    if who in OURS:
        return ours(args, command)
    found = {n: measured([*command, "--threads", str(n)], args, n) for n in args.peer_threads}
    return {**best.merged(list(found.values())), "threads": best.threads(found)}


def ours(args, command):
    """Ours; a second process tells the steps alone, where decode has the projection in it."""
    command = [*command, "--threads", str(args.threads)]
    found = measured(command, args)
    if found.get("prefill") is None:
        found["steps"] = measured([*command, "--from-first-token"], args)["decode"]
    return found


def rounds(args, commands, alone):
    """Everything of one model: {who: [result of each round]}. Memory of one sequence is that of a process that had no more.

    That process comes first: whatever it reads is in the system's cache for the one whose start counts. And one comes before
    all that count, where there is something that it leaves: files of the peers' converters, packed weights of ours."""
    results = {who: [] for who in commands}
    if not args.smoke:
        for who in commands:
            if not who.startswith(("torch-", "vllm-")):
                of_threads(args, who, alone[who])
    for number in range(args.rounds):
        for who, command in commands.items():
            alone_mb = None if args.smoke else of_threads(args, who, alone[who])["peak_mb"]
            result = of_threads(args, who, command)
            result["peak_mb_alone"] = alone_mb or result["peak_mb"]
            results[who].append(result)
            print(f"  {number + 1}/{args.rounds} {who:18} {json.dumps(result)}", flush=True)
    return results


def main():
    args = arguments()
    runs = programs(args)
    found, items = models(args, runs[None])
    stored = args.out / (f"peers-{args.isa}.json" if args.isa else "peers.json")
    document = json.loads(stored.read_text()) if stored.exists() and not args.smoke else None
    for name, (directory, kind) in found.items():
        print(name, flush=True)
        of_batches = [commands(args, runs, directory, kind, items, batches) for batches in (args.batches, [1])]
        results = {name: rounds(args, *of_batches)}
        document = table.merged(document, table.document(results, found, args, ROOT))
        if not args.smoke:
            store(document, stored)
    print("\n" + table.markdown(document))


def store(document, path):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(table.markdown(document))
    path.with_suffix(".svg").write_text(table.plot(document))


if __name__ == "__main__":
    sys.exit(main())
