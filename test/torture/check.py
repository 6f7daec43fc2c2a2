"""
check.py
    Checks a history: the journal of a round, and the tables after it.

The checker does not know how the clients work or which faults occurred, except two
facts about the round:

    steady    the clock was not set, so that leases can be timed
    lossy     a promotion can lose commits: those that are not older than the
              promotion's mark, in the epoch that the promotion ends

A record is firm if no promotion can have lost its data. verdict() returns the errors,
as pairs of a check's name and a message, or nothing.
"""

from collections import defaultdict

SUBSCRIPTIONS = ("once", "together", "relayed")
SLACK = 0.02  # seconds by which two clocks of one machine can differ


class History:
    """A journal, by key."""

    def __init__(self, records, lossy):
        self.answers = defaultdict(list)
        self.tokens = defaultdict(list)
        self.renewals = defaultdict(list)
        self.accepted = []  # renewals and checkpoints
        self.checkpoints = []
        self.releases = defaultdict(list)
        self.completing = {}
        self.refused = []
        self.prepared = {}
        self.deciding = {}  # the first time
        self.gone = []
        self.acked = defaultdict(list)  # by subscription and event
        self.given = []
        self.shown = []  # all tokens, in the order of the journal
        self.lossy = lossy
        self.marks = {r["epoch"]: r["i"] for r in records if r["what"] == "mark"}
        for record in records:
            self.add(record)

    def add(self, record):
        """add stores a record by its kind."""
        what = record["what"]
        if what == "answer":
            self.answers[record["key"]].append(record)
        elif what == "token":
            self.tokens[record["key"]].append(record)
            self.shown.append(record)
        elif what == "renewed":
            self.renewals[record["key"]].append(record)
            self.accepted.append(record)
        elif what == "checkpointed":
            self.accepted.append(record)
            self.checkpoints.append(record)
        elif what == "releasing":
            self.releases[record["key"]].append(record)
        elif what == "completing":
            self.completing[record["attempt"], record["token"]] = record
        elif what == "refused":
            self.refused.append(record)
        elif what == "prepared":
            self.prepared[record["attempt"]] = record
        elif what == "deciding":
            self.deciding.setdefault(record["attempt"], record)
        elif what == "gone":
            self.gone.append(record)
        elif what == "acked":
            for event in record["events"]:
                self.acked[record["subscription"], event].append(record)
        elif what == "given":
            self.given.append(record)

    def is_firm(self, record):
        """is_firm returns whether no promotion can have lost the record."""
        return not self.lossy or record["i"] < self.marks.get(record["epoch"], float("inf"))

    def together(self, one, other):
        """together returns whether the server of one record had the data of the other."""
        return one["epoch"] == other["epoch"] or self.is_firm(one)


def check_effects(history, state):
    """check_effects finds effects that are lost, repeated, or without their key."""
    effects = defaultdict(list)
    for effect in state["effects"]:
        effects[effect["key"]].append(effect)
    for key, found in effects.items():
        if len(found) > 1:
            yield "effects", f"{key} has {len(found)} effects: {found}"
        if key not in state["keys"]:
            yield "effects", f"{key} has an effect and no stored response: {found}"
    for key, answer in state["keys"].items():
        declined = answer.startswith("402|")
        wanted = 0 if declined else 1
        if len(effects[key]) < wanted:
            yield "effects", f"{key} has the stored response {answer}, and no effect"
        if declined and effects[key]:
            yield "effects", f"{key} was declined, and has an effect: {effects[key]}"
        if not declined and answer != "seen":
            for effect in effects[key]:
                if f'"{effect["attempt"]}"' not in answer:
                    yield "effects", f"{key} has the effect {effect} and the response {answer}"
    for key, answers in history.answers.items():
        firm = [a for a in answers if history.is_firm(a)]
        if firm and key not in state["keys"]:
            yield "effects", f"{key} was acknowledged and is not stored: {firm[0]}"
        for answer in firm:
            if answer["how"] == "owner" and not answer["answer"].startswith("402|") \
                    and not any(e["attempt"] == answer["attempt"] for e in effects[key]):
                yield "effects", f"{key} does not have the effect that was acknowledged: {answer}, {effects[key]}"


def check_prepared(history, state):
    """check_prepared finds prepared transactions that were lost, or ended differently than decided."""
    effects = {(effect["key"], effect["attempt"]) for effect in state["effects"]}
    for attempt, record in history.prepared.items():
        there = (record["key"], attempt) in effects
        if record["decision"] == "ROLLBACK" and there:
            yield "prepared", f"{record['key']} has the effect of an attempt that was rolled back: {record}"
        # All prepared transactions are ended as decided before the check.
        if record["decision"] == "COMMIT" and not there and history.is_firm(record):
            yield "prepared", f"{record['key']} does not have the effect that was prepared: {record}"
    for record in history.gone:
        prepared = history.prepared.get(record["attempt"])
        # A repeated decision follows a first one whose reply might have been lost.
        if prepared is not None and history.together(prepared, record) \
                and history.deciding[record["attempt"]]["i"] == record["since"]:
            yield "prepared", f"a prepared transaction did not exist when it was decided: {prepared}, {record}"


def check_answers(history, state):
    """check_answers compares the responses of a key with each other and with the stored one."""
    for key, answers in history.answers.items():
        stored = state["keys"].get(key)
        by_epoch = {}
        for answer in answers:
            text = answer["answer"]
            if by_epoch.setdefault(answer["epoch"], text) != text:
                yield "answers", f"{key} returned {by_epoch[answer['epoch']]}, and then {answer}"
            if history.is_firm(answer) and stored is not None and text != stored:
                yield "answers", f"{key} returned {answer}, and {stored} is stored"


def check_tokens(history, state):
    """check_tokens compares each token with those that were shown before it was requested."""
    if history.lossy:
        epochs = sorted({r["epoch"] for r in history.shown})
    else:
        epochs = [None]
    for epoch in epochs:
        seen = sorted((r for r in history.shown if epoch is None or r["epoch"] == epoch
                       or (r["epoch"] < epoch and history.is_firm(r))), key=lambda r: r["i"])
        yield from compare_tokens(seen)


def compare_tokens(shown):
    """compare_tokens compares tokens, in the order in which they were shown."""
    owners = {}
    greatest = []  # of all tokens up to a record: number of the record, token
    place = 0
    for record in shown:
        former = owners.setdefault(record["token"], record)
        if former is not record:
            yield "tokens", f"a token was issued twice: {former}, {record}"
    for record in sorted(shown, key=lambda r: r["since"]):
        while place < len(shown) and shown[place]["i"] < record["since"]:
            if not greatest or shown[place]["token"] > greatest[-1]["token"]:
                greatest.append(shown[place])
            place += 1
        if greatest and greatest[-1]["token"] >= record["token"]:
            yield "tokens", f"a token decreased: {greatest[-1]}, then {record}"


def check_fencing(history, state):
    """check_fencing finds stale tokens that were accepted, and current tokens that were rejected."""
    effects = {effect["key"]: effect for effect in state["effects"] if effect["token"] is not None}
    epochs = {(r["key"], r["token"], r["attempt"]): r for r in history.shown}
    for key, effect in effects.items():
        granted = epochs.get((key, effect["token"], effect["attempt"]))
        if granted is None:
            yield "fencing", f"{key} was finished with a token that no client was shown: {effect}"
            continue
        for later in history.tokens[key]:
            if later["token"] > effect["token"] and (later["epoch"] == granted["epoch"] or history.is_firm(later)):
                yield "fencing", f"{key} was finished with a stale token: {effect}, although there was {later}"
    for record in history.accepted:
        for later in history.tokens[record["key"]]:
            # An owner that called before the later token was shown might have been
            # first.
            if later["token"] > record["token"] and later["i"] < record["since"] and history.together(later, record):
                yield "fencing", f"a stale token was accepted: {record}, although there was {later}"
    for key, answers in history.answers.items():
        for answer in answers:
            yield from check_after_answer(history, key, answer)
    for record in history.refused:
        effect = effects.get(record["key"])
        if effect is not None and effect["token"] == record["token"] and effect["attempt"] == record["attempt"]:
            yield "fencing", f"the current token was rejected: {record}"
        if record["key"].startswith("held-") and history.steady and history.is_firm(record):
            yield "fencing", f"a live lease was lost: {record}"


def check_after_answer(history, key, answer):
    """check_after_answer finds keys that were granted after a response was returned."""
    for token in history.tokens[key]:
        if token["since"] > answer["i"] and history.together(answer, token):
            yield "fencing", f"{key} was granted after a response: {answer}, {token}"


def check_leases(history, state):
    """check_leases finds owners that started before the previous lease ended."""
    for key, tokens in history.tokens.items():
        for former, token in zip(tokens, tokens[1:]):
            if token["token"] < former["token"] or not history.together(former, token):
                continue
            released = any(r["token"] == former["token"] and r["i"] < token["i"] for r in history.releases[key])
            if token["outcome"] == "claimed" and not released:
                yield "leases", f"{key} was claimed as a new key: {former}, {token}"
            starts = [former["claimed_at"]] + [r["asked_at"] for r in history.renewals[key]
                                               if r["token"] == former["token"] and r["i"] < token["since"]]
            ends = max(starts) + former["lease"]
            if history.steady and not released and token["at"] < ends - SLACK:
                yield "leases", f"{key} was taken over {ends - token['at']:.3f} s early: {former}, {token}"


def check_steps(history, state):
    """check_steps compares the steps with checkpoints, and the recovery points of takeovers."""
    steps = defaultdict(list)
    for step in state["steps"]:
        steps[step["key"]].append(step)
    for key, found in steps.items():
        if len(found) > 1:
            yield "steps", f"{key} has its first step {len(found)} times: {found}"
    for effect in state["effects"]:
        if effect["token"] is not None and not steps[effect["key"]]:
            yield "steps", f"{effect['key']} has its second step and not the first: {effect}"
    for record in history.checkpoints:
        if history.is_firm(record) and not any((s["attempt"], s["token"]) == (record["attempt"], record["token"])
                                               for s in steps[record["key"]]):
            yield "steps", f"{record['key']} does not have the step of a checkpoint: {record}, {steps[record['key']]}"
    for record in history.shown:
        found = steps[record["key"]]
        if record.get("point") is None or not history.is_firm(record):
            continue
        if not found or found[0]["state"] != record["state"]:
            yield "steps", f"an owner received a checkpoint that does not exist: {record}, {found}"


def check_events(history, state):
    """check_events finds events that were lost, invented, handled twice or out of order."""
    events = {effect["event"]: effect["key"] for effect in state["effects"]}
    counts = {name: defaultdict(int) for name in SUBSCRIPTIONS}
    last = {}
    for row in sorted(state["handled"], key=lambda r: r["place"]):
        counts[row["subscription"]][row["event"]] += 1
        if row["event"] not in events:
            yield "events", f"{row['subscription']} has handled an event that was not published: {row}"
        if row["aggregate"] is not None:
            where = row["subscription"], row["aggregate"]
            if row["n"] <= last.get(where, 0):
                yield "events", f"{row['subscription']} has handled {row} after number {last[where]}"
            last[where] = row["n"]
    for name in SUBSCRIPTIONS:
        for event, key in events.items():
            count = counts[name][event]
            if count == 0:
                yield "events", f"{name} has never handled event {event} of {key}"
            elif count > 1:
                yield "events", f"{name} has handled event {event} of {key} {count} times"
    for given in history.given:
        for event in given["events"]:
            for acked in history.acked[given["subscription"], event]:
                if acked["i"] <= given["since"] and history.together(acked, given):
                    yield "events", (f"{given['subscription']} received event {event} in record {given['i']},"
                                     f" after it had acknowledged it in record {acked['i']}")


def check_counters(history, state):
    """check_counters compares counters with the effects that increment them."""
    for kind, factor in (("deadlock", 2), ("serial", 1)):
        effects = sum(effect["key"].startswith(kind + "-") for effect in state["effects"])
        count = sum(n for name, n in state["counters"].items() if name.startswith(kind))
        if count != factor * effects:
            yield "counters", f"{effects} effects of {kind}, and a count of {count}"


CHECKS = (check_effects, check_prepared, check_answers, check_tokens, check_fencing, check_leases, check_steps,
          check_events, check_counters)


def verdict(records, state, steady=True, lossy=False):
    """verdict returns all errors of a history."""
    times = {record["i"]: record["at"] for record in records}
    for record in records:
        if record["what"] == "token":
            record["claimed_at"] = times[record["since"]]
        elif record["what"] == "renewed":
            record["asked_at"] = times[record["since"]]
    history = History(records, lossy)
    history.steady = steady
    return [wrong for check in CHECKS for wrong in check(history, state)]
