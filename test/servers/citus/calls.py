"""
calls.py
    The forms in which clients call a function.
"""

import json
import uuid

# A call that is a whole statement is delegated to the node of the tenant, if the function is distributed; in
# the other forms it runs on the node that the client has called.
FORMS = ("statement", "cast", "subquery", "block", "two nodes")


def call(session, form, function, tenant, key, order, amount):
    """call calls a function that charges, commits, and returns its answer in a comparable form."""
    session.autocommit = form not in ("block", "two nodes")
    cursor = session.cursor()
    arguments = (tenant, key, order, amount)
    if form == "two nodes":
        # with another shard, on any node
        cursor.execute("INSERT INTO api.note (tenant, note) VALUES (%s, %s)", ("other " + order, order))
    if form == "cast":
        cursor.execute(f"SELECT {function}(%s, %s, %s, %s)::text", arguments)
    elif form == "subquery":
        cursor.execute(f"SELECT s.answer FROM (SELECT {function}(%s, %s, %s, %s) AS answer OFFSET 0) AS s", arguments)
    else:
        cursor.execute(f"SELECT {function}(%s, %s, %s, %s)", arguments)
    answer = cursor.fetchone()[0]
    if not session.autocommit:
        session.commit()
    return comparable(answer)


def lease(session, tenant, key, order, amount):
    """lease charges with a lease: one transaction claims, and another one writes and completes."""
    session.autocommit = True
    cursor = session.cursor()
    scope = tenant + "/lease"
    cursor.execute("SELECT o.replayed, o.token, o.response FROM idempotency.claim(%s, %s, %s::text, lease => '2 seconds') AS o",
                   (scope, key, json.dumps({"order": order, "amount": amount})))
    replayed, token, response = cursor.fetchone()
    if replayed:
        return comparable(response)
    session.autocommit = False
    body = {"id": str(uuid.uuid4()), "order": order}
    cursor.execute("INSERT INTO api.charge (tenant, id, order_no, amount) VALUES (%s, %s, %s, %s)", (tenant, body["id"], order, amount))
    cursor.execute("SELECT idempotency.complete(%s, %s, %s::text, 201, token => %s)", (scope, key, json.dumps(body), token))
    answer = cursor.fetchone()[0]
    session.commit()
    return comparable(answer)


def comparable(answer):
    """comparable returns an answer as text, whatever its type was."""
    return json.dumps(json.loads(answer) if isinstance(answer, str) else answer, sort_keys=True)
