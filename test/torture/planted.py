#!/usr/bin/python3
"""
planted.py
    Shows that the checker rejects wrong histories.

It builds a small correct history, which must be accepted. It then plants one error at a
time in a copy, in the journal or in the tables. The intended check must reject each
copy. Exits non-zero if one is not rejected.
"""

import copy
import sys

import check


class Story:
    """A journal and the tables after it, built by one call after the other."""

    def __init__(self):
        self.records = []
        self.state = {"effects": [], "steps": [], "handled": [], "keys": {},
                      "counters": {"deadlock 1": 0, "deadlock 2": 0, "serial 1": 0, "serial 2": 0}}
        self.epoch = 0

    def note(self, what, at=None, **record):
        """note adds a record, a second after the last one."""
        last = self.records[-1]["at"] if self.records else 0
        self.records.append({"what": what, "i": len(self.records) + 1, "epoch": self.epoch,
                             "at": last + 1 if at is None else last + at, **record})
        return len(self.records)

    def stored(self, key, attempt, token=None, answer=None, **event):
        """stored adds the rows of a committed operation."""
        event_id = f"event of {key}"
        self.state["effects"].append({"key": key, "attempt": attempt, "token": token, "event": event_id})
        self.state["keys"][key] = answer or '201|{ }|{"attempt" :  "%s"}' % attempt
        for name in check.SUBSCRIPTIONS:
            self.state["handled"].append({"place": len(self.state["handled"]) + 1, "subscription": name,
                                          "event": event_id, "aggregate": None, "n": None, **event})
        return self.state["keys"][key]

    def token(self, key, attempt, token, outcome, at=1, **received):
        """token adds a granted lease."""
        since = self.note("claiming", key=key, attempt=attempt, at=at)
        self.note("token", key=key, attempt=attempt, token=token, outcome=outcome, since=since, lease=0.4, at=0.01,
                  **{"point": None, "state": None, **received})

    def accepted(self, key, attempt, token, intent="renewing", what="renewed"):
        """accepted adds a call that accepted a token."""
        since = self.note(intent, key=key, attempt=attempt, token=token, at=0.01)
        self.note(what, key=key, attempt=attempt, token=token, since=since, lease=0.4, at=0.01)


def right():
    """right builds a correct history."""
    story = Story()

    # One operation in one transaction, and its replay; one declined operation; two
    # messages.
    story.note("want", key="plain-1", attempt="1.0.0")
    answer = story.stored("plain-1", "1.0.0")
    story.note("answer", key="plain-1", attempt="1.0.0", answer=answer, how="owner")
    story.note("answer", key="plain-1", attempt="1.1.0", answer=answer, how="replay")
    story.state["keys"]["decline-2"] = '402|{"declined" :  "2.0.0"}'
    story.note("answer", key="decline-2", attempt="2.0.0", answer='402|{"declined" :  "2.0.0"}', how="owner")
    story.stored("inbox-3", "3.0.0", answer="seen")
    story.note("answer", key="inbox-3", attempt="3.0.0", answer="seen", how="owner")

    # Its event: the first batch is redelivered, because it was not acknowledged.
    for _ in range(2):
        story.note("given", subscription="once", events=["event of inbox-3"], since=len(story.records))
    story.note("acked", subscription="once", events=["event of inbox-3"])

    # A lease, a checkpoint, a heartbeat, another one whose reply arrives after the
    # takeover, a stale owner that is rejected, and the completion.
    story.token("lease-4", "4.0.0", 11, "claimed")
    story.state["steps"].append({"key": "lease-4", "attempt": "4.0.0", "token": 11, "state": "{by 4.0.0}"})
    story.accepted("lease-4", "4.0.0", 11, "checkpointing", "checkpointed")
    story.accepted("lease-4", "4.0.0", 11)
    since = story.note("renewing", key="lease-4", attempt="4.0.0", token=11)
    story.token("lease-4", "4.1.0", 12, "taken_over", point="charged", state="{by 4.0.0}")
    story.note("renewed", key="lease-4", attempt="4.0.0", token=11, since=since, lease=0.4)
    story.note("completing", key="lease-4", attempt="4.0.0", token=11)
    story.note("refused", key="lease-4", attempt="4.0.0", token=11)
    story.note("completing", key="lease-4", attempt="4.1.0", token=12)
    story.note("answer", key="lease-4", attempt="4.1.0", answer=story.stored("lease-4", "4.1.0", 12), how="owner")
    story.token("held-5.0.0", "5.0.0", 13, "claimed")

    # Two increments, whose events have an order; one transaction that was prepared and
    # rolled back by a client that got no reply and repeated the decision; and one that
    # was prepared and committed.
    for number in (6, 7):
        answer = story.stored(f"deadlock-{number}", f"{number}.0.0", aggregate="deadlock 1", n=number - 5)
        story.note("answer", key=f"deadlock-{number}", attempt=f"{number}.0.0", answer=answer, how="owner")
    story.state["counters"].update({"deadlock 1": 2, "deadlock 2": 2})
    story.note("prepared", key="prepared-8", attempt="8.0.0", decision="ROLLBACK")
    story.note("deciding", key="prepared-8", attempt="8.0.0")
    since = story.note("deciding", key="prepared-8", attempt="8.0.0")
    story.note("gone", key="prepared-8", attempt="8.0.0", since=since)
    story.note("prepared", key="prepared-8", attempt="8.0.1", decision="COMMIT")
    story.note("answer", key="prepared-8", attempt="8.0.1", answer=story.stored("prepared-8", "8.0.1"), how="owner")
    return story


def lossy():
    """lossy builds a history with a promotion that lost a response, a prepared transaction and a takeover, and with later clients."""
    story = right()
    story.token("lease-11", "11.0.0", 21, "claimed")
    story.note("mark")
    story.token("lease-11", "11.1.0", 22, "taken_over")
    story.note("prepared", key="prepared-10", attempt="10.0.0", decision="COMMIT")
    story.note("answer", key="plain-9", attempt="9.0.0", answer='201|{ }|{"attempt" :  "9.0.0"}', how="owner")
    story.note("acked", subscription="once", events=["event of plain-1"])
    story.epoch = 1
    story.note("given", subscription="once", events=["event of plain-1"], since=len(story.records))
    story.note("answer", key="plain-9", attempt="9.1.0", answer=story.stored("plain-9", "9.1.0"), how="owner")
    story.note("answer", key="prepared-10", attempt="10.1.0", answer=story.stored("prepared-10", "10.1.0"), how="owner")
    story.accepted("lease-11", "11.0.0", 21)
    return story


def find(story, what, **like):
    """find returns the first such record."""
    return next(r for r in story.records if r["what"] == what and like.items() <= r.items())


def effect(story, key):
    """effect returns the effect of a key."""
    return next(e for e in story.state["effects"] if e["key"] == key)


def without(rows, **like):
    """without removes the matching rows."""
    rows[:] = [row for row in rows if not like.items() <= row.items()]


def answer_of(story, key):
    """answer_of returns the last response of a key."""
    return [r for r in story.records if r["what"] == "answer" and r["key"] == key][-1]


# The planted errors: the check that must detect each, and the change.
PLANTS = {
    "a double effect": ("effects", lambda s: s.state["effects"].append(dict(effect(s, "plain-1")))),
    "a double effect of another attempt": ("effects", lambda s: s.state["effects"].append(
        {**effect(s, "plain-1"), "attempt": "1.1.0"})),
    "a lost effect": ("effects", lambda s: without(s.state["effects"], key="plain-1")),
    "a lost effect of the inbox": ("effects", lambda s: without(s.state["effects"], key="inbox-3")),
    "an effect of the inbox, lost with its key and repeated": (
        "effects", lambda s: effect(s, "inbox-3").update(attempt="3.1.0")),
    "an effect without its key": ("effects", lambda s: s.state["keys"].pop("inbox-3")),
    "a response that was lost with its effect": ("effects", lambda s: (
        without(s.state["effects"], key="plain-1"), s.state["keys"].pop("plain-1"))),
    "an effect of a declined operation": ("effects", lambda s: s.state["effects"].append(
        {"key": "decline-2", "attempt": "2.0.0", "token": None, "event": "event of plain-1"})),
    "a response of another effect": ("effects", lambda s: effect(s, "plain-1").update(attempt="1.1.0")),
    "an effect that was rolled back": ("prepared", lambda s: effect(s, "prepared-8").update(attempt="8.0.0")),
    "a prepared transaction that was lost, and repeated by another attempt": ("prepared", lambda s: s.note(
        "prepared", key="prepared-8", attempt="8.1.0", decision="COMMIT")),
    "a lost prepared transaction that was to be rolled back": ("prepared", lambda s: find(
        s, "deciding", attempt="8.0.0").update(attempt="8.0.1")),
    "a different response": ("answers", lambda s: answer_of(s, "plain-1").update(answer='201|{ }|{"attempt" : "1.0.0"}')),
    "a response that differs from the stored one": ("answers", lambda s: s.state["keys"].update(
        {"plain-1": '201|{ }|{"attempt" :   "1.0.0"}'})),
    "a token that decreases": ("tokens", lambda s: find(s, "token", token=13).update(token=10)),
    "a repeated token": ("tokens", lambda s: find(s, "token", token=13).update(token=12)),
    "a stale token that completes": ("fencing", lambda s: effect(s, "lease-4").update(token=11, attempt="4.0.0")),
    "a stale token that renews": ("fencing", lambda s: s.accepted("lease-4", "4.0.0", 11)),
    "a stale token that checkpoints": ("fencing", lambda s: s.accepted(
        "lease-4", "4.0.0", 11, "checkpointing", "checkpointed")),
    "an unknown token": ("fencing", lambda s: effect(s, "lease-4").update(token=99)),
    "a claim after the response": ("fencing", lambda s: s.token("lease-4", "4.2.0", 14, "taken_over")),
    "a current token that was rejected": ("fencing", lambda s: s.note(
        "refused", key="lease-4", attempt="4.1.0", token=12)),
    "a lease that was reaped": ("fencing", lambda s: s.note("refused", key="held-5.0.0", attempt="5.0.0", token=13)),
    "a lease taken over too early": ("leases", lambda s: find(s, "token", token=12).update(
        at=find(s, "renewing")["at"] + 0.3)),
    "a lost lease": ("leases", lambda s: find(s, "token", token=12).update(outcome="claimed")),
    "a repeated step": ("steps", lambda s: s.state["steps"].append(
        {"key": "lease-4", "attempt": "4.1.0", "token": 12, "state": "{by 4.1.0}"})),
    "a missing step": ("steps", lambda s: s.state["steps"].clear()),
    "a lost checkpoint whose step the next owner repeats": ("steps", lambda s: (
        s.state["steps"][0].update(attempt="4.1.0", token=12, state="{by 4.1.0}"),
        find(s, "token", token=12).update(point=None, state=None))),
    "a checkpoint with another state": ("steps", lambda s: find(s, "token", token=12).update(state="{by 4.0.1}")),
    "a lost event": ("events", lambda s: without(s.state["handled"], event="event of plain-1", subscription="relayed")),
    "a repeated effect of an event": ("events", lambda s: s.state["handled"].append(
        {**s.state["handled"][0], "place": 99})),
    "an event of a transaction that rolled back": ("events", lambda s: s.state["handled"].append(
        {"place": 99, "subscription": "once", "event": "another", "aggregate": None, "n": None})),
    "events out of order": ("events", lambda s: [row.update(n=3 - row["n"]) for row in s.state["handled"] if row["n"]]),
    "an event that is redelivered after its acknowledgement": ("events", lambda s: s.note(
        "given", subscription="once", events=["event of inbox-3"], since=len(s.records))),
    "a lost update": ("counters", lambda s: s.state["counters"].update({"deadlock 2": 1})),
}
LOSSY_PLANTS = {
    "a lost response from before the mark": ("effects", lambda s: (
        without(s.state["effects"], key="plain-1"), s.state["keys"].pop("plain-1"))),
    "an effect from before the mark, lost with its key and repeated": (
        "effects", lambda s: effect(s, "inbox-3").update(attempt="3.1.0")),
    "an event acknowledged before the mark that is redelivered": ("events", lambda s: s.note(
        "given", subscription="once", events=["event of inbox-3"], since=len(s.records))),
    "an effect that was lost without its key": ("effects", lambda s: without(s.state["effects"], key="plain-9")),
    "a key that was lost without its effect": ("effects", lambda s: s.state["keys"].pop("plain-9")),
    "a lost effect that still exists": ("effects", lambda s: s.state["effects"].append(
        {**effect(s, "plain-9"), "attempt": "9.0.0"})),
    "a prepared transaction from after the promotion that was lost": ("prepared", lambda s: find(
        s, "prepared", attempt="10.0.0").update(epoch=1)),
    "a stale token that renews on the server that showed the greater one": ("fencing", lambda s: find(
        s, "token", token=22).update(epoch=1)),
    "a stale token that renews, although the greater one is from before the mark": ("fencing", lambda s: find(
        s, "mark").update(i=find(s, "token", token=22)["i"] + 1)),
    "two responses after a promotion": ("answers", lambda s: s.note(
        "answer", key="plain-9", attempt="9.2.0", answer="201", how="replay")),
}


def failed_checks(story, **facts):
    """failed_checks returns the names of the checks that fail."""
    story = copy.deepcopy(story)
    return sorted({name for name, _ in check.verdict(story.records, story.state, **facts)})


def main():
    """main plants each error, runs the checks, and returns how many errors were not detected."""
    wrong = 0
    for build, plants, facts in ((right, PLANTS, {}), (lossy, LOSSY_PLANTS, {"lossy": True})):
        found = failed_checks(build(), **facts)
        if found:
            print(f"checker: a correct history is rejected by {found}")
            wrong += 1
        for name, (expected, plant) in plants.items():
            story = build()
            plant(story)
            found = failed_checks(story, **facts)
            if expected not in found:
                print(f"checker: {name} is not rejected by [{expected}], but by {found}")
                wrong += 1
    if "answers" not in failed_checks(lossy()):
        print("checker: a lost response is accepted where no loss is permitted")
        wrong += 1
    print(f"checker: {len(PLANTS) + len(LOSSY_PLANTS) + 1 - wrong} planted histories rejected, {wrong} not")
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
