"""
plan.py
    The actions of all clients and faults, derived from the seed.

The seed determines which clients request which operation, its type, the actions of each
attempt, and which fault strikes in which phase at which moment. The interleaving of
clients and faults depends on the scheduler.
"""

import random

CLIENTS = 8
COPIES = 3  # how many clients request the same operation
WINDOW = 6  # how many operations a client can be ahead of the slowest one

# Types of operations and their weights.
TYPES = {
    "plain": 18,  # claim, write, complete in one transaction
    "procedure": 8,  # the same in one call
    "decline": 5,  # a final failure is stored, its writes are rolled back
    "lease": 24,  # in several transactions, under a lease
    "prepared": 9,  # with two-phase commit
    "deadlock": 8,  # locks two rows in any order
    "serial": 8,  # SERIALIZABLE, with others that it conflicts with
    "inbox": 7,  # once, for one key
    "batch": 5,  # once, for three keys
    "junk": 3,  # an outcome that expires at once, for the reaper
    "held": 3,  # a live lease, with a retention that has ended
    "sweep": 3,  # takes over abandoned operations
    "reap": 4,  # reaps
}
CONFLICTS = {"deadlock": 45, "serial": 45, "plain": 5, "prepared": 5}

# Types whose operations have a response and an effect.
ANSWERED = ("plain", "procedure", "decline", "lease", "prepared", "deadlock", "serial", "inbox", "batch")
BATCH = 3  # keys of a batch

# Phases of faults. The last two are those of background workers: the handler of a
# subscription, and the reaper.
PHASES = ("claim", "write", "complete", "commit", "procedure", "prepare", "prepared", "decide",
          "checkpoint", "renew", "takeover", "reap", "once", "fetch", "handle", "ack",
          "handler", "reaper")
WORKER_PHASES = ("handler", "reaper", "launcher", "relay")
MOMENTS = ("before", "during", "after")


def chance(*names):
    """chance returns a random generator that depends on the seed and these names."""
    return random.Random("/".join(str(name) for name in names))


def type_of(seed, number, weights):
    """type_of returns the type of an operation."""
    return chance(seed, "type", number).choices(list(weights), list(weights.values()))[0]


def is_wanted(seed, number, client):
    """is_wanted returns whether a client requests an operation."""
    return client in chance(seed, "who", number).sample(range(CLIENTS), COPIES)


def keys_of(kind, number):
    """keys_of returns the keys of an operation."""
    if kind == "batch":
        return [f"{kind}-{number}.{part}" for part in range(BATCH)]
    return [f"{kind}-{number}"]


def request_of(key, rng):
    """request_of returns a request, each time the same value with different text."""
    number = int(key.split("-")[1].split(".")[0])
    amount = rng.choice([f"{number}", f"{number}.0", f"{number}.00"])
    parts = [f'"amount":{rng.choice(["", " "])}{amount}', f'"key": "{key}"']
    rng.shuffle(parts)
    return "{" + ", ".join(parts) + "}"


def aims_of(seed, kind, phases, count):
    """aims_of yields phase, moment and delay of each fault: all phases in turn, shuffled."""
    rng = chance(seed, "aims", kind)
    todo = []
    for _ in range(count):
        if not todo:
            todo = list(phases)
            rng.shuffle(todo)
        yield todo.pop(), rng.choice(MOMENTS), 0.004 * rng.random() ** 2
