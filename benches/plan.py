"""Goodput of four topologies on this machine, and how right the plan is: curves in service, thirteen workloads, the bars.

    python3 benches/plan.py --out results                 # three hours, on a machine with nothing else to do
    python3 benches/plan.py --out results --window 60     # longer runs, eight hours
    python3 benches/plan.py --out results --full          # then four workloads as the rule asks, three hours
    python3 benches/plan.py --out again --repeat 3 --rates 7 12 --workload mixed:with=0.5,images=1-4    # eleven minutes
    python3 benches/plan.py --out timed --timed benches/curves/qwen2-vl-tiny-in-service-1.json   # two and a half hours
    python3 benches/plan.py --out slow --timed benches/curves/qwen2-vl-tiny-in-service-1.json --slower 3 --window 45 --shares 0.45 0.9

It goes on where it was broken off: what lies in the folder is not measured again. `table.md` has the goodput of each cell with
its interval, `validation.md` the bars, each as passed or missed, `report.md` every run, `overlay.md` where time goes,
`residuals.json` the model's error for later plans (`triptych plan --residuals`). A cell is a search over rates from the goodput
that the plan expects, of one seed, of up to three where that leaves a rate open, for all that pass it too; the topologies of a
workload take turns, run by run, since the machine's speed drifts. With `--full` each run has 1000 requests or 600 s and three
seeds, in blocks of a minute between turns. All topologies begin with the same rate at the same time, and go up while they pass
and down while they fail, in the same steps: what one is measured at half an hour after another says more of the machine than of
them. `full.md` has every run.

With `--repeat` the same load with the same seed is measured several times, at two rates. `repeat.md` has the share of pairs of these
runs whose latencies are within the bar of one another: a plan is hardly nearer to a measurement than another
measurement is.

With `--timed` workers compute nothing and take as long as the curves say (`--timed-by`); proxy, store, scheduler, network and client
are the real ones. The machine's speed then hardly counts: topologies differ by what the software makes of them. A profile of such
a worker comes first, by which all is simulated. There is no `colocated`, which needs curves of two threads, and no `overlay.md`.

With `--slower` these times and the SLOs are so many times as long, and the host has less to do meanwhile. With `--shares` each
topology is measured at these shares of its simulated goodput, without a search: for latencies, not for goodput.
"""

import argparse
import itertools
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# SLOs in milliseconds.
SHORT = "ttft=1500,tpot=5"
LONG = "ttft=3000,tpot=5"
WORKLOADS = {
    "epd-short:images=1": SHORT,
    "epd-short:images=3": SHORT,
    "epd-short:images=2,share=0.5": SHORT,
    "mixed:with=0.5,images=1-4": SHORT,
    "epd-long:images=1": LONG,
    "epd-short:images=2,share=0.9": SHORT,
    "epd-short:images=2": SHORT,
    "mixed:with=0.25,images=1-4": SHORT,
    "epd-long:images=3": LONG,
    "mixed:with=0.75,images=1-4": SHORT,
    "epd-short:images=4": SHORT,
    "epd-long:images=2": LONG,
    "epd-long:images=4": LONG,
}
TOPOLOGIES = ["1e1pd", "colocated", "dp2", "elastic2"]
# Apart, together and reuse at their best, and a mix; with the topologies that win any row.
DECIDING = ["epd-short:images=1", "epd-short:images=2,share=0.9", "mixed:with=0.5,images=1-4", "epd-long:images=1"]
CONTENDERS = ["1e1pd", "dp2", "elastic2"]
# Two rates of a search that are this near end it, as a share.
RESOLUTION = 0.13
# Rates of `--full`: so many steps below and above the middle of what is expected.
FULL_STEPS = 6
WARM_UP_S = 2
# Latencies that are judged, and the bar at the lower and at the higher rate.
JUDGED = [(name, latency, at) for name, latency in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")) for at in ("p50", "p90")]
BARS = [0.1, 0.2]


def run(*command, to=None):
    """Runs a program; its output goes to a file, which appears when it is complete."""
    print("$", " ".join(map(str, command)), flush=True)
    if to is None:
        subprocess.run(command, check=True)
        return
    part = to.with_name(to.name + ".part")
    with open(part, "w") as lines:
        subprocess.run(command, check=True, stdout=lines)
    part.rename(to)


def curve_flags(files):
    return [flag for file in files for flag in ("--curves", str(file))]


class Validation:
    def __init__(self, args):
        self.args, self.out = args, args.out
        self.binary = str(args.binary.resolve())
        self.model = ["--load-format", "dummy", "--precision", "int8"]
        # Cores of each file of curves; timed workers have one, and of the host what they leave to preprocessing and network.
        self.curves = {self.out / "timed.json": "0,1"} if args.timed else {
            self.out / "curves-1.json": "0",
            self.out / "curves-2.json": "0,1",
        }
        self.topologies = [t for t in TOPOLOGIES if not (args.timed and t == "colocated")]
        # Timed workers leave their cores to proxy, store and clients.
        self.side = [] if args.timed else ["--one-machine"]
        self.timed_by = self.out / "timed-by.json"
        self.cluster = [*self.model, *(["--timed-by", str(self.timed_by)] if args.timed else [])]

    def slo(self, workload):
        latencies = (one.split("=") for one in WORKLOADS[workload].split(","))
        return ",".join(f"{name}={float(ms) * self.args.slower:g}ms" for name, ms in latencies)

    def write_times(self):
        """Curves by which workers are timed, slowed; a folder has one file of them."""
        curves = json.loads(self.args.timed.read_text())
        encodes = [points for tower in (curves, *curves.get("more_towers", [])) for points in tower["encode"]]
        for point in encodes + curves["step"]:
            point["p50_us"] *= self.args.slower
            point["p95_us"] *= self.args.slower
        text = json.dumps(curves)
        if self.timed_by.exists() and self.timed_by.read_text() != text:
            sys.exit(f"{self.out} was measured with other times, of --timed or --slower: give another --out")
        self.timed_by.write_text(text)

    def measure_curves(self):
        for threads, (file, cores) in enumerate(self.curves.items(), 1):
            if not file.exists():
                part = file.with_name(file.name + ".part")
                flags = ["--threads", str(threads), "--cores", cores, "--rounds", str(self.args.rounds), "-o", str(part)]
                run(self.binary, "profile", self.args.model, *self.cluster, *flags, to=file.with_suffix(".md"))
                part.rename(file)

    def folder_of(self, workload):
        return self.out / "in-service" / re.sub(r"[^a-z0-9.-]", "_", workload)

    def forget(self, workload):
        """Removes calibration and expectation of a workload that an earlier start did not measure: they are of its time."""
        cells = [json.loads(file.read_text()) for file in (self.out / "cells").glob("*.json")]
        if any(one["setup"]["workload"] == workload for one in cells):
            return
        shutil.rmtree(self.folder_of(workload), ignore_errors=True)
        file = self.out / "expected.json"
        if file.exists():
            known = json.loads(file.read_text())
            known.pop(workload, None)
            file.write_text(json.dumps(known, indent=1))

    def in_service(self, workload):
        """Curves scaled to a cluster in service just before the workload is measured, as flags: the machine's speed drifts."""
        if self.args.timed:
            return curve_flags(self.curves)
        folder = self.folder_of(workload)
        page = folder / "factors.md"
        if not page.exists():
            folder.mkdir(parents=True, exist_ok=True)
            flags = ["--cores", "0,1", "--output", str(folder), "--model", self.args.model, *self.model]
            run(self.binary, "plan", "calibrate", *flags, *curve_flags(self.curves), to=page)
            print(page.read_text())
        return curve_flags([folder / file.name for file in self.curves])

    def expected(self, workload):
        """Goodput of each topology by the plan; kept, so that a second start measures the same."""
        file = self.out / "expected.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        if workload not in known:
            flags = ["--slo", self.slo(workload), "--workload", workload, "--budget", "2cores", "--quick", "--json"]
            command = [self.binary, "plan", *self.side, *self.in_service(workload), *flags]
            print("$", " ".join(command), flush=True)
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            found = {}
            simulated = [(one["name"], one["first_search"]) for one in answer["simulated"]]
            # Of what was not simulated only a bound is known.
            for name, rate in simulated + [(name, 0.7 * bound) for name, bound in answer["pruned"]]:
                topology = name.split(" (")[0]
                found[topology] = max(rate, found.get(topology, 0))
            known[workload] = {t: round(found.get(t) or max(found.values()), 2) for t in self.topologies}
            file.write_text(json.dumps(known, indent=1))
        return known[workload]

    def simulated(self, workload):
        """Goodput of each topology by simulation; kept. The plan leaves out those that cannot be the best."""
        folder = self.out / "compared" / self.folder_of(workload).name
        file = folder / "compare.json"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            flags = ["--slo", self.slo(workload), "--workloads", workload, "--day", "none", "--seeds", "3", "--requests", "400"]
            flags += ["--topology", ",".join(self.topologies), "--output", str(folder)]
            run(self.binary, "plan", "compare", *self.side, *self.in_service(workload), *flags, to=folder / "compare.log")
        (found,) = json.loads(file.read_text())
        return {topology: goodput["mean"] for topology, goodput in found["goodput"]}

    def suite(self, workload, topologies, *more, out):
        flags = ["--slo", self.slo(workload), "--workload", workload, "--topology", ",".join(topologies), "--out", str(out)]
        flags += ["--cores", "0,1", "--requests", "1000", "--seeds", "3", "--until-clear", "--block", "0"]
        flags += ["--max-window", str(self.args.window), "--warm-up", f"{WARM_UP_S * self.args.slower:g}"]
        run(self.binary, "bench", "suite", "--model", self.args.model, *self.cluster, *flags, *more)

    def full(self):
        """Runs as long as the rule asks for, from the middle of what the short ones found, or of what the plan expects."""
        self.measure_curves()
        for workload in self.args.workload or DECIDING:
            middle = statistics.median(self.passing(workload, topology) for topology in CONTENDERS)
            rates = [f"{middle * (1 + RESOLUTION) ** step:.4g}" for step in range(-FULL_STEPS, FULL_STEPS + 1)]
            flags = ["--slo", self.slo(workload), "--workload", workload, "--topology", ",".join(CONTENDERS)]
            flags += ["--cores", "0,1", "--rates", ",".join(rates), "--until-bracketed", "--block", "60", "--out", str(self.out / "full")]
            run(self.binary, "bench", "suite", "--model", self.args.model, *self.cluster, *flags)
        run(self.binary, "bench", "report", str(self.out / "full"), "--out", str(self.out / "full.md"))

    def repeat(self):
        """The same load several times, and how near the runs are to one another."""
        folders = [self.out / f"repeat-{n}" for n in range(self.args.repeat)]
        for folder, workload in itertools.product(folders, self.args.workload):
            self.suite(workload, self.topologies, "--rates", ",".join(f"{rate:g}" for rate in self.args.rates), out=folder)
        page = repeats(folders, self.args.rates)
        (self.out / "repeat.md").write_text(page)
        print(page)

    def passing(self, workload, topology):
        """The highest rate that passed in a short run, or the expected one."""
        for file in sorted((self.out / "cells").glob("*.json")):
            one = json.loads(file.read_text())
            if (one["setup"]["workload"], one["setup"]["topology"]) == (workload, topology) and one["goodput"]["rate"]:
                return round(one["goodput"]["rate"], 2)
        return self.expected(workload)[topology]

    def validate(self):
        # Each cell is simulated with the curves that were scaled last before it.
        flags = [*self.side, "--results", str(self.out / "cells"), "--output", str(self.out)]
        for workload in self.args.workload or WORKLOADS:
            flags += self.in_service(workload)
        run(self.binary, "plan", "validate", *flags, to=self.out / "validation.log")
        run(self.binary, "bench", "report", str(self.out / "cells"), "--out", str(self.out / "report.md"))
        (self.out / "table.md").write_text(table(self.out / "cells", self.topologies))

    def overlay(self):
        page = self.out / "overlay.md"
        if page.exists():
            return
        workload, topology = "epd-short:images=2", "1e1pd"
        rate = round(0.8 * self.expected(workload)[topology], 2)
        trace, simulated = self.out / "trace.json", self.out / "simulated.json"
        trace.unlink(missing_ok=True)
        flags = ["--rates", str(rate), "--worker-flags", f"--trace-file {trace.resolve()}"]
        self.suite(workload, [topology], *flags, out=self.out / "traced")
        n = max(50, int(rate * (self.args.window + WARM_UP_S)))
        flags = ["--slo", self.slo(workload), "--workload", workload, "--topology", topology]
        flags += ["--rate", str(rate), "--requests", str(n)]
        run(self.binary, "plan", "trace", "--one-machine", *self.in_service(workload), *flags, "-o", str(simulated))
        run(sys.executable, str(ROOT / "benches/overlay.py"), str(trace), str(simulated), "--steps", "40", to=page)

    def measure(self, workload):
        """Goodput of each topology, or its latencies at shares of what is expected."""
        cells = self.out / "cells"
        if self.args.shares:
            for topology, goodput in self.simulated(workload).items():
                rates = ",".join(f"{share * goodput:.3g}" for share in self.args.shares)
                self.suite(workload, [topology], "--rates", rates, out=cells)
            return
        first = statistics.median(self.expected(workload).values())
        flags = ["--first-rate", str(round(first, 2)), "--resolution", str(RESOLUTION)]
        self.suite(workload, self.topologies, *flags, out=cells)

    def all(self):
        began = time.monotonic()
        self.measure_curves()
        workloads = self.args.workload or WORKLOADS
        for n_done, workload in enumerate(workloads, 1):
            self.forget(workload)
            self.measure(workload)
            print(f"{n_done} of {len(workloads)} workloads, {time.monotonic() - began:.0f} s", flush=True)
        self.validate()
        if not self.args.timed:
            self.overlay()
        print((self.out / "table.md").read_text())
        print(f"{time.monotonic() - began:.0f} s; {self.out}/table.md, validation.md, report.md")


def repeats(folders, rates):
    """Pairs of runs of one load that are within the bar of one another, as Markdown; of each rate the first seed."""
    runs = {}
    for file in (file for folder in folders for file in sorted(folder.glob("*.json"))):
        one = json.loads(file.read_text())
        for rate in one["rates"]:
            load = (one["setup"]["workload"], one["setup"]["topology"], rate["rate"])
            runs.setdefault(load, []).append(rate["runs"][0]["verdict"])
    lines = ["| latency | " + " | ".join(f"{rate:g} requests/s, within {bar:.0%}" for rate, bar in zip(rates, BARS)) + " |"]
    lines.append("| --- | ---: | ---: |")
    near, total = 0, 0
    for name, latency, at in JUDGED:
        cells = []
        for asked, bar in zip(rates, BARS):
            values = [[run[latency][at] for run in of_load] for load, of_load in runs.items() if load[2] == asked]
            pairs = [pair for of_load in values for pair in itertools.permutations(of_load, 2) if all(pair)]
            n_near = sum(abs(a / b - 1) <= bar for a, b in pairs)
            cells.append(f"{n_near} of {len(pairs)}")
            near, total = near + n_near, total + len(pairs)
        lines.append(f"| {name} {at} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{near} of {total} pairs, each both ways.\n"


def bracket(goodput):
    """The highest rate that passes and the lowest that fails, requests/s."""
    passes, fails = goodput.get("rate") or 0, goodput.get("fails_at")
    return f"{passes:.1f} to {fails:.1f}" if fails else f"{passes:.1f} or more"


def table(cells, topologies):
    """Goodput of every cell as Markdown; the best of a row, and those whose interval meets its, are bold."""
    results = [json.loads(file.read_text()) for file in sorted(cells.glob("*.json"))]
    found = {(one["setup"]["workload"], one["setup"]["topology"]): one["goodput"] for one in results}
    lines = ["| workload | " + " | ".join(topologies) + " |", "| --- |" + " ---: |" * len(topologies)]
    for workload in WORKLOADS:
        row = [found.get((workload, topology)) for topology in topologies]
        if not any(row):
            continue
        best = max((one.get("rate") or 0 for one in row if one), default=0)
        texts = []
        for one in row:
            if one is None:
                texts.append("–")
                continue
            is_best = (one.get("rate") or 0) == best or (one.get("fails_at") or best) > best
            texts.append(f"**{bracket(one)}**" if is_best else bracket(one))
        lines.append(f"| {workload} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of results")
    parser.add_argument("--window", type=int, default=16, help="judged seconds of a run")
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, help="some of the workloads")
    parser.add_argument("--full", action="store_true", help="the workloads that decide, in runs as long as the rule asks")
    parser.add_argument("--repeat", type=int, metavar="N", help="the same load N times, at --rates, and how near the runs are")
    parser.add_argument("--rates", nargs=2, type=float, metavar=("LOW", "HIGH"), help="of --repeat: half load, and near capacity")
    parser.add_argument("--timed", type=pathlib.Path, metavar="CURVES", help="workers that take their time from these curves")
    parser.add_argument("--slower", type=float, default=1, metavar="TIMES", help="of --timed: times and SLOs so many times as long")
    parser.add_argument("--shares", nargs="+", type=float, help="no search: rates as shares of the simulated goodput")
    parser.add_argument("--rounds", type=int, default=5, help="repeats of each point of a curve")
    parser.add_argument("--model", default=str(ROOT / "benches/models/qwen2-vl-tiny"))
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/triptych")
    args = parser.parse_args()
    if not args.binary.exists():
        sys.exit(f"{args.binary} is not there: cargo build --release, or --binary FILE")
    if args.repeat is not None and (args.repeat < 2 or not (args.rates and args.workload)):
        parser.error("--repeat needs 2 and more, --rates LOW HIGH and --workload")
    if args.slower != 1 and not args.timed:
        parser.error("--slower needs --timed: workers that compute take the time they take")
    args.out.mkdir(parents=True, exist_ok=True)
    validation = Validation(args)
    if args.timed:
        validation.write_times()
    if args.repeat:
        validation.repeat()
    elif args.full:
        validation.full()
    else:
        validation.all()


if __name__ == "__main__":
    main()
