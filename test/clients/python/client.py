"""The frame of the Python clients: reads requests as lines of JSON, calls the driver, and answers each with a line.

A driver's program passes the class of its sessions to serve(), made from name, host, and whether to prepare statements. A session has query(), insert(), and block(), which
begins a transaction, or within one a savepoint, and returns an object with commit() and rollback().
"""

import datetime
import json
import sys
import uuid

def native(kind, value, wrap):
    """Returns an argument in the type in which an application has it."""
    if kind == "wrapped":
        return wrap(value)
    if kind == "UUID key":
        return uuid.UUID(value)
    if kind == "UUIDs":
        return [uuid.UUID(each) for each in value]
    if kind == "interval":
        return datetime.timedelta(seconds=value)
    if kind == "bytes":
        return bytes.fromhex(value)
    return value


def answer(session, request, wrap):
    """Does what a request says, and returns the rows."""
    do = request["do"]
    if do in ("begin", "savepoint"):
        session.blocks.append(session.block())
    elif do == "commit":
        session.blocks.pop().commit()
    elif do == "rollback to savepoint":
        session.blocks.pop().rollback()
    elif do == "rollback":
        while session.blocks:
            session.blocks.pop().rollback()
    elif do == "insert":
        session.insert(**request["values"])
    else:
        rows = session.query(request["sql"], [native(kind, value, wrap) for kind, value in request["arguments"]])
        return [json.loads(row[0]) for row in rows] if do == "query json" else [list(row) for row in rows]
    return []


def serve(make_session, sqlstate, wrap=None):
    """Answers requests until the end of the input. A session is made at its first request."""
    sessions = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            key = request["session"], request["host"], request["prepared"]
            if key not in sessions:
                sessions[key] = make_session(*key)
                sessions[key].blocks = []
            reply = {"rows": answer(sessions[key], request, wrap)}
        except Exception as error:  # what the driver raises is what the case compares
            reply = {"error": sqlstate(error) or "", "message": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply, default=str), flush=True)
