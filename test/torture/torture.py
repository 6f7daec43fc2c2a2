#!/usr/bin/python3
"""
torture.py directory results
    Runs rounds of faults, checks each, and adds up their counts.

"directory" is the directory of the servers, "results" that of the counts and of files
of failed rounds. The environment selects the rounds (see run). It first shows that the
checker can reject (planted.py). The last line has the counts; the exit code is 0 if no
check failed and each phase was struck.
"""

import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import faults
import places
import planted
from round import World, run_round
from server import Server

# The kinds, with the number of faults in a round: of the short run, of the long one.
KINDS = {
    "backend": (faults.KillBackend, 18, 60),
    "terminate": (faults.Terminate, 18, 60),
    "cancel": (faults.Cancel, 15, 60),
    "timeout": (faults.Timeout, 14, 60),
    "postmaster": (faults.KillPostmaster, 9, 30),
    "immediate": (faults.Immediate, 9, 30),
    "fast": (faults.Fast, 9, 30),
    "worker": (faults.KillWorker, 10, 30),
    "prepared": (faults.Prepared, 7, 30),
    "conflict": (faults.Conflict, 20, 100),
    "clock": (faults.ClockJump, 18, 50),
    "disk": (places.FullDisk, 6, 20),
    "pooler": (places.KillPooler, 12, 40),
    "sync": (places.SyncPromotion, 3, 10),
    "async": (places.AsyncPromotion, 3, 10),
}

# If a kind has this many times as many faults as phases, it must have struck in each
# phase. A single fault can miss, or strike in another phase if no client reaches its
# own.
ENOUGH = 8

# The share of full disks that must have been noticed, out of the number in three short
# rounds. Normally all are. If one in ten were not, one such run in a thousand would
# fail; with four in five, one in ten.
DISKS = 3 * KINDS["disk"][1]
NOTICED = 2 / 3


def make_template(directory, bindir):
    """make_template creates the cluster that each round copies."""
    template = Server(bindir, os.path.join(directory, "template"))
    template.initialize({})
    template.start()
    with open(os.path.join(os.path.dirname(__file__), "schema.sql"), encoding="utf-8") as schema:
        template.query(schema.read())
    template.stop()
    return template


def play(kind, number, count, seed, directory, template, results):
    """play runs one round, and returns its entry in the counts file."""
    make_fault = KINDS[kind][0]
    here = os.path.join(directory, f"{kind}-{number}")
    os.makedirs(here)
    began = time.monotonic()
    world = World(kind, seed, number, here, lambda world: make_fault(world, template))
    failures = run_round(world, count)
    entry = {"kind": kind, "seed": seed, "round": number, "faults": count,
             "seconds": round(time.monotonic() - began, 1), "failures": len(failures),
             "counts": dict(world.counts), "phases": dict(world.phases), "errors": dict(world.errors)}
    print(f"{'FAILED  ' if failures else 'ok      '} torture/{kind} round {number}: {world.counts['faults']} faults, "
          f"{world.counts['intents']} intents, {world.counts['effects']} effects, {entry['seconds']} s", flush=True)
    if failures:
        for failure in failures[:10]:
            print("        ", failure)
        kept = os.path.join(results, f"{kind}-{seed}-{number}")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(here, kept, ignore=lambda _, names: [n for n in names if n in ("data", ".s.PGSQL.5432")
                                                             or n.startswith(".s.")])
        print(f"         {len(failures)} failures; the history is kept; to repeat the round:")
        print(f"         make torture SEED={seed} KINDS={kind} FIRST={number} ROUNDS=1 FAULTS={count}"
              + " TRACE=yes" * world.fault.traceable, flush=True)
    shutil.rmtree(here, ignore_errors=True)
    return entry


def load_counts(path):
    """load_counts returns the entries of earlier rounds, the last one of each."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as counts_file:
        entries = [json.loads(line) for line in counts_file]
    return list({(e["kind"], e["seed"], e["round"], e["faults"]): e for e in entries}.values())


def total(entries):
    """total prints the sums of the entries; true if there are any, and none has failed."""
    kinds, seen, struck = collections.Counter(), collections.Counter(), collections.Counter()
    for entry in entries:
        kinds[entry["kind"]] += entry["counts"].get("faults", 0)
        seen.update({name: count for name, count in entry["counts"].items() if name != "faults"})
        struck.update({(entry["kind"], phase): count for phase, count in entry["phases"].items()})
    phases = [(kind, phase) for kind in KINDS if kind in kinds for phase in sorted(set(KINDS[kind][0].phases))]
    never = [(kind, phase) for kind, phase in phases if not struck[kind, phase]]
    wrong = [f"{kind}: no fault has struck in the phase {phase}" for kind, phase in never
             if kinds[kind] >= ENOUGH * len(KINDS[kind][0].phases)]
    if kinds["disk"] >= DISKS and seen["disks noticed"] < NOTICED * kinds["disk"]:
        wrong.append(f"disk: of {kinds['disk']} full disks {seen['disks noticed']} were noticed")
    for what in wrong:
        print("FAILED   torture/" + what)
    failed = sum(entry["failures"] > 0 for entry in entries)
    names = ("intents", "effects", "acknowledged", "replays", "takeovers", "stale tokens rejected", "prepared",
             "prepared over a crash", "deadlocks", "serialization failures", "deliveries", "disks noticed",
             "answers lost")
    print(f"torture: {len(entries)} rounds, {failed} failed; "
          + ", ".join(f"{kind} {kinds[kind]}" for kind in KINDS if kind in kinds)
          + f"; {len(phases)} phases, {len(never)} never struck, {seen['aimed elsewhere']} aimed elsewhere; "
          + ", ".join(f"{name} {seen[name]}" for name in names))
    print(f"counts: operations={seen['intents']} faults={sum(kinds.values())} "
          f"violations={sum(entry['failures'] for entry in entries) + len(wrong)}")
    return bool(entries) and not failed and not wrong


def main():
    """main runs the rounds that the environment selects."""
    directory, results = sys.argv[1:3]
    # libpq prints on stderr how connections end, which happens all the time here.
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.path.join(directory, "libpq"), os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    if planted.main():
        sys.exit(1)
    environment = os.environ
    seed = environment.get("SEED") or "1"
    first = int(environment.get("FIRST") or 1)
    rounds = int(environment.get("ROUNDS") or 1)
    kinds = (environment.get("KINDS") or " ".join(KINDS)).split()
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not re.fullmatch(r"[\w.-]+", seed):
        sys.exit(f"torture: no such kind or seed; the kinds are {' '.join(KINDS)}")
    counts_file = os.path.join(results, "counts")
    done = {(e["kind"], e["seed"], e["round"], e["faults"]) for e in load_counts(counts_file) if not e["failures"]}
    bindir = subprocess.run([environment["PG_CONFIG"], "--bindir"], stdout=subprocess.PIPE, text=True, check=True)
    template = make_template(directory, bindir.stdout.strip())

    entries = []
    for number in range(first, first + rounds):
        for kind in kinds:
            count = int(environment.get("FAULTS") or KINDS[kind][1 if environment.get("SHORT") else 2])
            if environment.get("RESUME") and (kind, seed, number, count) in done:
                continue
            entry = play(kind, number, count, seed, directory, template, results)
            entries.append(entry)
            with open(counts_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
    sys.exit(not total(entries))


if __name__ == "__main__":
    if sys.argv[1:2] == ["total"]:
        sys.exit(not total(load_counts(sys.argv[2])))
    elif sys.argv[1:] == ["kinds"]:
        print(" ".join(KINDS))
    else:
        main()
