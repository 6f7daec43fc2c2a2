"""
storm.py
    Every session runs every operation until it is answered, while shards move and nodes are killed.

Each operation is a duplicate of the other sessions' at about the same time, in a random form and on a random
node. One in four has a lease, which one transaction claims and another one completes.
"""

import collections
import json
import multiprocessing
import os
import queue
import random
import threading
import time

import psycopg2

import calls
from cluster import COORDINATOR, PORTS

# Time limit of a storm, in seconds
SECONDS = 1200

TENANTS = [f"tenant{number}" for number in range(16)]


def operation(name, number):
    """operation returns the tenant, the key, the order and the amount of an operation."""
    return TENANTS[number % len(TENANTS)], f"{name}-{number:05}", f"{name}-{number:05}", 10 + number


def client(cluster, name, function, operations, seed, results, late):
    """client is one session's process. It gives up if it is late."""
    dice = random.Random(seed)
    sessions, answers, errors = {}, [], collections.Counter()
    for number in range(operations):
        while not late.is_set():
            port = dice.choice(PORTS)
            try:
                if port not in sessions:
                    sessions[port] = cluster.connect(port)
                if number % 4 == 3 and function == "api.charge":
                    answer = calls.lease(sessions[port], *operation(name, number))
                else:
                    here = function == "api.charge" and dice.random() < 0.3
                    answer = calls.call(sessions[port], dice.choice(calls.FORMS), function + "_here" * here, *operation(name, number))
                answers.append(answer)
                break
            except psycopg2.Error as error:
                errors[error.pgcode or "connection lost"] += 1
                try:
                    sessions[port].rollback()
                except (KeyError, psycopg2.Error):
                    sessions.pop(port, None)
                time.sleep(0.005 + dice.random() * 0.03)
    results.put((answers, errors))


def move(cluster, done, counts, dice):
    """move moves the shard of a tenant, again and again, until the sessions are done."""
    while not done.wait(dice.uniform(0.2, 0.7)):
        try:
            cluster.move(*cluster.home(dice.choice(TENANTS)), dice.choice(("block_writes", "force_logical")))
            counts["moves"] += 1
        except psycopg2.Error as error:
            counts["move refused: " + str(error).split("\n", maxsplit=1)[0][-60:]] += 1


def storm(cluster, name, function, operations, clients, seed, with_faults):
    """storm returns what is wrong, and the figures."""
    results, began = multiprocessing.Queue(), time.monotonic()
    late = multiprocessing.Event()
    sessions = [multiprocessing.Process(target=client, daemon=True,
                                        args=(cluster, name, function, operations, seed * 100 + n, results, late))
                for n in range(clients)]
    for session in sessions:
        session.start()
    done, counts, dice = threading.Event(), collections.Counter(), random.Random(seed)
    mover = threading.Thread(target=move, daemon=True, args=(cluster, done, counts, random.Random(seed)))
    if with_faults:
        mover.start()
    answers, errors, ended = collections.defaultdict(list), collections.Counter(), 0
    while ended < clients:
        # The servers are children of this thread, and would end with another one.
        try:
            given, failed = results.get(timeout=dice.uniform(1, 4))
        except queue.Empty:
            if time.monotonic() - began > SECONDS:
                late.set()
            elif with_faults:
                cluster.kill(dice.choice(PORTS))
                counts["kills"] += 1
            continue
        ended += 1
        errors.update(failed)
        for number, answer in enumerate(given):
            answers[number].append(answer)
    done.set()
    if with_faults:
        mover.join()
    for session in sessions:
        session.join()
    seconds = time.monotonic() - began
    return judge(cluster, name, operations, answers, counts, errors, seconds)


def judge(cluster, name, operations, answers, counts, errors, seconds):
    """judge compares effects, keys and answers."""
    time.sleep(4)  # until prepared transactions of killed nodes are resolved
    effects = collections.defaultdict(list)
    for order, effect in cluster.query(COORDINATOR, "SELECT order_no, id::text FROM api.charge WHERE order_no LIKE %s", name + "-%"):
        effects[order].append(effect)
    figures = {
        "operations": operations,
        "calls": sum(map(len, answers.values())),
        "double": sum(len(ids) > 1 for ids in effects.values()),
        "lost": sum(operation(name, number)[2] not in effects for number in answers),
        "differing": sum(len(set(given)) > 1 for given in answers.values()),
        "not the effect": sum(json.loads(given[0])["id"] not in effects[operation(name, number)[2]] for number, given in answers.items()),
        "effects": sum(map(len, effects.values())),
        "keys": cluster.query(COORDINATOR, "SELECT count(*) FROM idempotency.keys WHERE key LIKE %s AND state = 'completed'",
                              name + "-%")[0][0],
        "prepared": sum(cluster.query(port, "SELECT count(*) FROM pg_prepared_xacts")[0][0] for port in PORTS),
        "moves": counts.pop("moves", 0),
        "kills": counts.pop("kills", 0),
        "seconds": round(seconds),
        "errors": dict(errors),
        "refused": dict(counts),
    }
    return figures


def check_storm(cluster):
    """check_storm runs the storm with the keys."""
    operations, moves, kills = (int(os.environ.get(name) or default) for name, default in
                                (("OPERATIONS", 6000), ("MOVES", 10), ("KILLS", 10)))
    figures = storm(cluster, "storm", "api.charge", operations, 8, int(os.environ.get("SEED") or 1), True)
    wrong = [f"{name}: {figures[name]}" for name in ("double", "lost", "differing", "not the effect", "prepared") if figures[name]]
    wrong += [f"{name}: {figures[name]}, not {operations}" for name in ("effects", "keys") if figures[name] != operations]
    wrong += [f"only {figures['calls']} answers"] if figures["calls"] != 8 * operations else []
    wrong += [f"only {figures[name]} {name}" for name, least in (("moves", moves), ("kills", kills)) if figures[name] < least]
    return wrong, figures


def check_control(cluster):
    """check_control shows that the storm finds doubles where nothing decides who writes."""
    figures = storm(cluster, "control", "api.charge_unarbitrated", 300, 8, 1, False)
    return [] if figures["double"] else ["the storm found no doubles"], figures
