"""
owner.py
    What clients do under leases: claim, take over, checkpoint, renew, release, stall
    until the lease is stale, and finish; and operations that create work for the reaper.

An owner writes every token and the time of its request to the journal; the checker
decides which grants were correct.
"""

import time

import psycopg2

import plan
from client import Client

LEASE = 0.4  # seconds
STALL = 1.6 * LEASE  # after which a stale owner checkpoints, renews or finishes
TRY_CLAIM = ("SELECT outcome, token, recovery_point, state::text, concat_ws('|', status, headers, response) AS answer"
             " FROM idempotency.try_claim('lease', %s, %s, lease => '400 ms', wait => %s)")
SWEEP = ("SELECT key, token, recovery_point, state::text"
         " FROM idempotency.claim_abandoned('lease', '400 ms', 2)")
CHECKPOINT = "SELECT 1 FROM idempotency.checkpoint('lease', %s, %s, 'charged', %s)"
RENEW = "SELECT renew FROM idempotency.renew('lease', %s, %s, '400 ms')"


class Refused(Exception):
    """The token is stale."""


def granted(client, key, attempt, token, outcome, since, point=None, state=None, kind="lease"):
    """granted writes a new token to the journal."""
    client.note("token", key=key, attempt=attempt, token=token, outcome=outcome, since=since,
                lease=LEASE if kind == "lease" else 20, point=point, state=state)
    if kind == "lease":
        client.world.leases[key] = time.monotonic() + LEASE


def phase_of(client, keys):
    """phase_of returns "takeover" if a known lease of these keys is over, by the local clock."""
    now = time.monotonic()
    return "takeover" if any(client.world.leases.get(key, now) < now for key in keys) else "claim"


def with_token(client, key, attempt, token, work):
    """with_token does work that can fail with IK410, which it writes to the journal."""
    try:
        work()
    except psycopg2.Error as error:
        if error.pgcode != "IK410":
            raise
        client.session.recover(error)
        client.note("refused", key=key, attempt=attempt, token=token)
        raise Refused from error


def lease(client, keys, attempt, rng):
    """lease claims or takes over, and executes the operation."""
    key = keys[0]
    session = client.session
    phase = phase_of(client, keys)
    since = client.note("claiming", key=key, attempt=attempt)
    [(outcome, token, point, state, answer, *_)] = session.call(
        phase, TRY_CLAIM, key, plan.request_of(key, rng), rng.choice(["0", "200 ms", "600 ms"]))
    if outcome == "replayed":
        client.world.leases.pop(key, None)
        return client.answered(key, answer, attempt, "replay")
    if outcome == "in_progress":
        left = client.world.leases.get(key, 0) - time.monotonic()
        time.sleep(left if left > 0 and rng.random() < 0.5 else 0.1 * rng.random())
        return False
    granted(client, key, attempt, token, outcome, since, point, state)
    return finish(client, key, attempt, token, point, rng)


def finish(client, key, attempt, token, point, rng):
    """finish executes an operation under a token."""
    choice = 1.0 if client.reliable else rng.random()
    try:
        if 0.5 <= choice < 0.55:
            time.sleep(STALL)
        if point is None:
            with_token(client, key, attempt, token, lambda: first_step(client, key, attempt, token))
        if choice < 0.3:
            with_token(client, key, attempt, token, lambda: renew(client, key, attempt, token))
        elif choice < 0.4:
            with_token(client, key, attempt, token, lambda: give_up(client, key, attempt, token))
            return False
        elif choice < 0.5:
            return False  # the owner stops without notice
        elif 0.55 <= choice < 0.7:
            time.sleep(STALL)
            if choice < 0.6:
                with_token(client, key, attempt, token, lambda: renew(client, key, attempt, token))
        with_token(client, key, attempt, token, lambda: second_step(client, key, attempt, token))
    except Refused:
        return False
    return True


def first_step(client, key, attempt, token):
    """first_step does the first of two steps, and stores a checkpoint."""
    session = client.session
    state = '{"by" :  "%s"}' % attempt
    since = client.note("checkpointing", key=key, attempt=attempt, token=token)
    session.run("BEGIN")
    session.call("write", "INSERT INTO torture.step SELECT %s, %s, %s, %s", key, attempt, token, state)
    session.call("checkpoint", CHECKPOINT, key, token, state)
    session.commit()
    client.note("checkpointed", key=key, attempt=attempt, token=token, since=since)


def renew(client, key, attempt, token):
    """renew is the heartbeat."""
    since = client.note("renewing", key=key, attempt=attempt, token=token)
    client.session.call("renew", RENEW, key, token)
    client.note("renewed", key=key, attempt=attempt, token=token, since=since, lease=LEASE)
    client.world.leases[key] = time.monotonic() + LEASE


def give_up(client, key, attempt, token):
    """give_up releases the operation to the next owner."""
    client.note("releasing", key=key, attempt=attempt, token=token)
    client.world.leases.pop(key, None)
    client.session.run("SELECT idempotency.release('lease', %s, %s)", (key, token))


def second_step(client, key, attempt, token):
    """second_step writes the effect and completes."""
    client.note("completing", key=key, attempt=attempt, token=token)
    client.session.run("BEGIN")
    client.write(key, attempt, token)
    answer = client.complete("lease", key, attempt, token)
    client.session.commit()
    client.world.leases.pop(key, None)
    client.answered(key, answer, attempt, "owner")


def sweep(client, _keys, attempt, rng):
    """sweep takes over abandoned operations and executes them."""
    since = client.note("claiming", key="*", attempt=attempt)
    rows = client.session.call(phase_of(client, list(client.world.leases)), SWEEP)
    for key, token, point, state, *_ in rows:
        granted(client, key, attempt, token, "taken_over", since, point, state)
    for key, token, point, *_ in rows:
        finish(client, key, attempt, token, point, rng)
    return True


def junk(client, keys, attempt, rng):
    """junk stores an outcome that expires at once."""
    session = client.session
    session.run("BEGIN")
    session.call("claim", "SELECT outcome FROM idempotency.claim('junk', %s, %s, retention => '1 ms')",
                 f"{keys[0]}.{attempt}", plan.request_of(keys[0], rng))
    session.call("complete", "SELECT complete::text FROM idempotency.complete('junk', %s, '1')", f"{keys[0]}.{attempt}")
    session.commit()
    return True


def held(client, _keys, attempt, rng):
    """held holds a long lease of a key with a short retention, which must not be reaped."""
    key = f"held-{attempt}"
    since = client.note("claiming", key=key, attempt=attempt)
    [(outcome, token, *_)] = client.session.call(
        "claim", "SELECT outcome, token FROM idempotency.claim('held', %s, lease => '20 s', retention => '1 ms')", key)
    granted(client, key, attempt, token, outcome, since, kind="held")
    time.sleep(0.3 * rng.random())
    try:
        with_token(client, key, attempt, token, lambda: client.session.call(
            "complete", "SELECT complete::text FROM idempotency.complete('held', %s, '1', token => %s)", key, token))
    except Refused:
        pass
    return True


def reap(client, _keys, _attempt, rng):
    """reap calls reap(), and changes the number of partitions of a subscription."""
    client.session.call("reap", "SELECT reap FROM idempotency.reap(100)")
    client.session.run("SELECT idempotency.alter_subscription(%s, partitions => %s)",
                       (rng.choice(("once", "together", "relayed")), rng.choice((1, 2, 3))))
    return True


# The attempt of each type of operation.
ATTEMPTS_AT = {
    "plain": Client.plain,
    "procedure": Client.procedure,
    "decline": Client.decline,
    "lease": lease,
    "prepared": Client.two_phases,
    "deadlock": Client.deadlock,
    "serial": Client.serial,
    "inbox": Client.inbox,
    "batch": Client.batch,
    "junk": junk,
    "held": held,
    "sweep": sweep,
    "reap": reap,
}
