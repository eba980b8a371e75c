"""The systems that are measured: which processes each is, on which cores, and when they are ready."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "services/ec/python/src"

#: Names in the table.
SYSTEMS = {
    "aggregated": "vLLM, one instance with both cores",
    "epd": "vLLM apart: its example proxy and example connector",
    "connector": "vLLM apart: its example proxy, our connector",
    "proxied": "vLLM apart: our proxy, our connector",
    "vllm-ours": "our proxy, vLLM's encoder, our prefill and decode",
    "ours-vllm": "our proxy, our encoder, vLLM prefill and decode",
    "ours": "all ours",
}


class NotStarted(Exception):
    """A process that ended or was not ready in time, with the end of its log."""


class Process:
    """A process on some cores, with a log. It is started again by `restart`."""

    def __init__(self, log, command, cores, env):
        self.log, self.name, self.cores = log, log.stem, cores
        self.command = [str(part) for part in command]
        self.env = {**os.environ, **env}
        self.url = ""
        self.start()

    def start(self):
        pinned = ["taskset", "-c", ",".join(map(str, self.cores)), *self.command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(pinned, stdout=log, stderr=log, env=self.env, start_new_session=True)

    def ready(self, url, patience_s=600):
        """Waits until the address answers, and remembers it."""
        self.url = url
        until = time.monotonic() + patience_s
        while not answers(url):
            if self.process.poll() is not None or time.monotonic() > until:
                raise NotStarted(f"{self.name} is not ready; its log ends:\n" + self.log.read_text(errors="replace")[-1500:])
            time.sleep(0.3)

    def signal_all(self, signal):
        """To the process and its children, which are a group of their own."""
        try:
            os.killpg(self.process.pid, signal)
        except ProcessLookupError:
            pass

    def kill(self):
        self.signal_all(9)
        self.process.wait()

    def stop(self):
        self.signal_all(15)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        self.kill()


def answers(url):
    """True if a server answers there with success; `redis://` is asked for a connection alone."""
    if url.startswith("redis://"):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Running:
    """The processes of a system, by role, and its address."""

    def __init__(self, args, folder, is_drill):
        self.args, self.folder, self.is_drill = args, folder, is_drill
        self.model = args.drill_model if is_drill else args.model
        self.processes = {}
        self.url = ""
        self.redis_port = None

    def add(self, role, command, cores, env=None):
        self.processes[role] = Process(self.folder / f"{role}.log", command, cores, env or {})
        return self.processes[role]

    def redis(self):
        """A Redis of its own; the address that a store is opened by."""
        self.redis_port = free_port()
        command = ["redis-server", "--port", self.redis_port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.add("redis", command, self.args.cores).ready(f"redis://127.0.0.1:{self.redis_port}")
        return f"redis://127.0.0.1:{self.redis_port}"

    def vllm(self, role, cores, transfer=None, more=()):
        """A vLLM server; its address. It is not waited for."""
        port = free_port()
        command = [self.args.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16"]
        command += ["--max-model-len", 1024 if self.is_drill or self.args.brief else 2048, "--max-num-seqs", 8]
        command += ["--limit-mm-per-prompt", '{"image": 1}', "--skip-mm-profiling", "--no-enable-prefix-caching", *more]
        command += ["--enforce-eager"] if self.args.eager or self.is_drill else []
        command += ["--ec-transfer-config", json.dumps(transfer)] if transfer else []
        env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
               "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": str(len(cores)), "VLLM_SERVER_DEV_MODE": "1",
               "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1"}
        self.add(role, command, cores, env)
        return f"http://127.0.0.1:{port}"

    def await_vllm(self, **urls):
        for role, url in urls.items():
            self.processes[role].ready(f"{url}/health")


def transfer(connector, role, extra):
    """vLLM's `--ec-transfer-config`."""
    found = {"ec_connector": connector, "ec_role": role, "ec_connector_extra_config": extra}
    if connector == "TriptychECConnector":
        found["ec_connector_module_path"] = "triptych_ec.vllm_connector"
    return found


def aggregated(run):
    run.url = run.vllm("pd", run.args.cores)
    run.await_vllm(pd=run.url)


def epd(run):
    shared = run.folder / "shared"
    shared.mkdir(exist_ok=True)
    apart(run, "ECExampleConnector", {"shared_storage_path": str(shared)})


def connector(run):
    apart(run, "TriptychECConnector", {"store": run.redis(), "patience_s": 10})


def apart(run, name, extra):
    first, second = run.args.cores
    encoder = run.vllm("encoder", [first], transfer(name, "ec_producer", extra))
    pd = run.vllm("pd", [second], transfer(name, "ec_consumer", extra))
    run.await_vllm(encoder=encoder, pd=pd)
    port = free_port()
    run.url = f"http://127.0.0.1:{port}"
    run.add("proxy", [run.args.python, HERE / "epd_proxy.py", port, encoder, pd], run.args.cores)
    run.processes["proxy"].ready(f"{run.url}/v1/models")


def proxied(run):
    store = run.redis()
    first, second = run.args.cores
    extra = {"store": store, "patience_s": 10}
    encoder = run.vllm("encoder", [first], transfer("TriptychECConnector", "ec_producer", extra))
    pd = run.vllm("pd", [second], transfer("TriptychECConnector", "ec_consumer", extra))
    run.await_vllm(encoder=encoder, pd=pd)
    our_proxy(run, store, f"vllm+{encoder}", f"vllm+{pd}")


def vllm_ours(run):
    store = run.redis()
    first, second = run.args.cores
    extra = {"store": store, "accept_proxy_keys": True}
    encoder = run.vllm("encoder", [first], transfer("TriptychECConnector", "ec_producer", extra))
    pd = our_worker(run, "pd", [second], store)
    run.await_vllm(encoder=encoder)
    our_proxy(run, store, f"vllm+{encoder}", pd)


def ours_vllm(run):
    store = run.redis()
    first, second = run.args.cores
    extra = {"store": store, "patience_s": 5, "accept_proxy_keys": True}
    pd = run.vllm("pd", [second], transfer("TriptychECConnector", "ec_consumer", extra), ["--enable-mm-embeds"])
    encoder = our_worker(run, "encoder", [first], store)
    run.await_vllm(pd=pd)
    our_proxy(run, store, encoder, f"vllm+{pd}")


def ours(run):
    store = run.redis()
    first, second = run.args.cores
    encoder, pd = our_worker(run, "encoder", [first], store), our_worker(run, "pd", [second], store)
    our_proxy(run, store, encoder, pd)


def our_worker(run, role, cores, store):
    """A worker of ours on one core; its address. It is not waited for."""
    address = f"127.0.0.1:{free_port()}"
    command = [run.args.binary, role, "--grpc", address, "--model", f"m={run.model}", "--precision", "bf16", "--threads", 1]
    run.add(role, [*command, "--ec", store, "--admin", "127.0.0.1:0"], cores)
    return address


def our_proxy(run, store, encoder, pd):
    """Our proxy before an encoder and a worker, once it is ready."""
    run.url = f"http://127.0.0.1:{free_port()}"
    command = [run.args.binary, "proxy", "--http", run.url.removeprefix("http://"), "--grpc", "127.0.0.1:0"]
    command += ["--encoder", encoder, "--pd", pd, "--ec", store, "--admin", "127.0.0.1:0"]
    # vLLM's restart in the drill takes longer than the default.
    command += ["--encoder-wait", 110] if encoder.startswith("vllm+") else []
    run.add("proxy", command, run.args.cores).ready(f"{run.url}/readyz")


START = {"aggregated": aggregated, "epd": epd, "connector": connector, "proxied": proxied, "vllm-ours": vllm_ours,
         "ours-vllm": ours_vllm, "ours": ours}


@contextmanager
def started(args, what, is_drill):
    """The system, ready; it is stopped in the end, whatever happens."""
    folder = args.scratch / what
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    running = Running(args, folder, is_drill)
    try:
        START[what](running)
        yield running
    finally:
        for process in reversed(running.processes.values()):
            process.stop()


def missing(args, what):
    """Why a system cannot be measured; empty: it can."""
    if what in ("ours-vllm", "proxied", "vllm-ours"):
        shown = subprocess.run([args.binary, "proxy", "--help"], capture_output=True, text=True, check=False).stdout
        if "vllm+http" not in shown:
            return "the proxy of this binary does not route to vLLM"
    if what != "aggregated" and what != "epd" and shutil.which("redis-server") is None:
        return "no redis-server"
    if what != "ours" and version(args.python) is None:
        return f"{args.python} has no vLLM: --python, or benches/peers/run.py --vllm"
    return ""


def version(python):
    """That of vLLM in an environment; `None`: it has none."""
    text = "import importlib.metadata as m; print(next(d.version for d in m.distributions() if d.name.startswith('vllm')))"
    try:
        done = subprocess.run([python, "-c", text], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
