"""How right the plan is on this machine: curves in service, four workloads on three topologies, and the bars.

    python3 benches/plan.py --out results                # at most 20 minutes, on a machine with nothing else to do
    python3 benches/plan.py --out results --minutes 60   # longer runs

It goes on where it was broken off: what lies in the folder is not measured again. `validation.md` has the bars, each as
passed or missed, `overlay.md` where time goes, `residuals.json` the model's error for later plans
(`triptych plan --residuals`). A cell is six rates, as parts of what the plan expects, of one seed.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORKLOADS = ["epd-short:images=1", "epd-short:images=3", "epd-short:images=2,share=0.5", "mixed:with=0.5,images=1-4"]
TOPOLOGIES = ["1e1pd", "dp2", "colocated"]
# Of the expected goodput. The least is about half of what a cluster carries that carries less than expected.
PARTS = [0.45, 0.65, 0.8, 0.9, 1.0, 1.15]
SLO = "ttft=1500ms,tpot=5ms"
WARM_UP_S = 2
# For the comparison at the end.
RESERVE_S = 60
# Start and end of a cluster, and answers that are under way when a window ends.
BESIDE_S = 3


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


class Validation:
    def __init__(self, args):
        self.args, self.out = args, args.out
        self.binary = str(args.binary)
        self.model = ["--load-format", "dummy", "--precision", "int8"]
        self.curves = [self.out / "curves-1.json", self.out / "curves-2.json"]
        self.in_service = self.out / "in-service"
        self.question = ["--slo", SLO, "--one-machine"]
        for file in [self.in_service / file.name for file in self.curves]:
            self.question += ["--curves", str(file)]
        n_runs = len(WORKLOADS) * len(TOPOLOGIES) * len(PARTS)
        # A fifth of the time is for curves, plans and the overlay.
        self.window = max(4, int(args.minutes * 60 * 0.8 / n_runs) - WARM_UP_S - BESIDE_S)

    def measure_curves(self):
        for threads, (cores, file) in enumerate(zip(["0", "0,1"], self.curves), 1):
            if not file.exists():
                part = file.with_name(file.name + ".part")
                flags = ["--threads", str(threads), "--cores", cores, "--rounds", str(self.args.rounds), "-o", str(part)]
                run(self.binary, "profile", self.args.model, *self.model, *flags, to=file.with_suffix(".md"))
                part.rename(file)

    def calibrate(self):
        page = self.out / "in-service.md"
        if not page.exists():
            flags = ["--cores", "0,1", "--output", str(self.in_service), "--model", self.args.model, *self.model]
            for file in self.curves:
                flags += ["--curves", str(file)]
            run(self.binary, "plan", "calibrate", *flags, to=page)
        print(page.read_text())

    def rates(self, workload):
        """Rates of each topology, from the plan; kept, so that a second start measures the same."""
        file = self.out / "rates.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        if workload not in known:
            flags = ["--workload", workload, "--budget", "2cores", "--quick", "--json"]
            command = [self.binary, "plan", *self.question, *flags]
            print("$", " ".join(command), flush=True)
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            found = {}
            simulated = [(one["name"], one["first_search"]) for one in answer["simulated"]]
            # Of what was not simulated only a bound is known.
            for name, rate in simulated + [(name, 0.7 * bound) for name, bound in answer["pruned"]]:
                topology = name.split(" (")[0]
                found[topology] = max(rate, found.get(topology, 0))
            wanted = {t: found.get(t) or max(found.values()) for t in TOPOLOGIES}
            known[workload] = {t: [round(rate * part, 2) for part in PARTS] for t, rate in wanted.items()}
            file.write_text(json.dumps(known, indent=1))
        return known[workload]

    def suite(self, workload, topology, rates, *more, out):
        flags = ["--slo", SLO, "--workload", workload, "--topology", topology, "--out", str(out), "--cores", "0,1"]
        flags += ["--requests", "1000", "--seeds", "1", "--max-window", str(self.window), "--warm-up", str(WARM_UP_S)]
        flags += ["--rates", ",".join(map(str, rates))]
        run(self.binary, "bench", "suite", "--model", self.args.model, *self.model, *flags, *more)

    def validate(self):
        flags = ["--results", str(self.out / "cells"), "--output", str(self.out)]
        run(self.binary, "plan", "validate", *self.question, *flags)

    def overlay(self):
        page = self.out / "overlay.md"
        if page.exists():
            return
        workload, topology = "epd-short:images=2", "1e1pd"
        rate = self.rates(workload)[topology][2]
        trace, simulated = self.out / "trace.json", self.out / "simulated.json"
        trace.unlink(missing_ok=True)
        self.suite(
            workload, topology, [rate], "--worker-flags", f"--trace-file {trace.resolve()}", out=self.out / "traced"
        )
        n = max(50, int(rate * (self.window + WARM_UP_S)))
        flags = ["--workload", workload, "--topology", topology, "--rate", str(rate), "--requests", str(n)]
        run(self.binary, "plan", "trace", *self.question, *flags, "-o", str(simulated))
        run(sys.executable, str(ROOT / "benches/overlay.py"), str(trace), str(simulated), "--steps", "40", to=page)
        print(page.read_text())

    def all(self):
        began = time.monotonic()
        self.measure_curves()
        self.calibrate()
        for workload in WORKLOADS:
            for topology, rates in self.rates(workload).items():
                if time.monotonic() - began > self.args.minutes * 60 - RESERVE_S:
                    sys.exit(f"{self.args.minutes} minutes are over; start it again to go on with {workload} on {topology}")
                self.suite(workload, topology, rates, out=self.out / "cells")
            # After each workload, so that what was measured is compared if time runs out.
            self.validate()
        self.overlay()
        print(f"\n{time.monotonic() - began:.0f} s; {self.out}/validation.md, overlay.md, curves-1.md, curves-2.md")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of results")
    parser.add_argument("--minutes", type=float, default=20, help="time for everything")
    parser.add_argument("--rounds", type=int, default=5, help="repeats of each point of a curve")
    parser.add_argument("--model", default=str(ROOT / "benches/models/qwen2-vl-tiny"))
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/triptych")
    args = parser.parse_args()
    if not args.binary.exists():
        sys.exit(f"{args.binary} is not there: cargo build --release, or --binary FILE")
    args.out.mkdir(parents=True, exist_ok=True)
    Validation(args).all()


if __name__ == "__main__":
    main()
