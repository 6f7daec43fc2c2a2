"""
checks.py
    What the keys do on each node of a quiet cluster.
"""

import threading
import time

import psycopg2

import calls
from cluster import COORDINATOR, PORTS, WORKERS

TENANT = "acme"
CALLS = [(form, port, function) for function in ("api.charge", "api.charge_here") for port in PORTS for form in calls.FORMS]


def number(cluster, statement, *values):
    """number returns the one number that a query returns on the coordinator."""
    return cluster.query(COORDINATOR, statement, *values)[0][0]


def code(session, statement, *values):
    """code returns the SQLSTATE of a transaction, or None."""
    try:
        cursor = session.cursor()
        cursor.execute(statement, values)
        session.commit()
        return None
    except psycopg2.Error as error:
        session.rollback()
        return error.pgcode


def check_forms(cluster, moved):
    """check_forms makes the first call in each form and on each node, and the retry in each other one."""
    sessions = {port: cluster.connect(port) for port in PORTS}
    pairs = [(f"forms-{moved}-{a}-{b}", first, retry) for a, first in enumerate(CALLS) for b, retry in enumerate(CALLS)]
    answers = {key: calls.call(sessions[port], form, function, TENANT, key, key, 5) for key, (form, port, function), _ in pairs}
    if moved:
        cluster.move(*cluster.home(TENANT), "block_writes")
    wrong = []
    for key, first, (form, port, function) in pairs:
        if calls.call(sessions[port], form, function, TENANT, key, key, 5) != answers[key]:
            wrong.append(f"{first} then {(form, port, function)}: another answer")
    for session in sessions.values():
        session.close()
    effects = dict(cluster.query(COORDINATOR, "SELECT order_no, count(*) FROM api.charge WHERE tenant = %s AND order_no LIKE %s"
                                 " GROUP BY 1", TENANT, f"forms-{moved}-%"))
    wrong += [f"{first} then {retry}: {effects.get(key, 0)} effects" for key, first, retry in pairs if effects.get(key) != 1]
    return wrong, f"{len(pairs)} pairs of calls, {sum(effects.values())} effects"


def check_guard(cluster):
    """check_guard leaves claims open, on each node."""
    wrong = []
    for port in PORTS:
        session = cluster.connect(port)
        for statements in ("", "SAVEPOINT s; SELECT idempotency.complete(%(scope)s, %(key)s); ROLLBACK TO s"):
            values = {"scope": TENANT + "/open", "key": f"{port}{len(statements)}", "tenant": TENANT}
            try:
                cursor = session.cursor()
                cursor.execute("SELECT idempotency.claim(%(scope)s, %(key)s); "
                               "INSERT INTO api.charge VALUES (%(tenant)s, gen_random_uuid(), 'open', 1); " + statements, values)
                session.commit()
                wrong.append(f"{port}: an open claim was committed")
            except psycopg2.Error as error:
                session.rollback()
                if error.pgcode != "IK428":
                    wrong.append(f"{port}: {error}")
        session.close()
    count = number(cluster, "SELECT count(*) FROM api.charge WHERE order_no = 'open'")
    if count:
        wrong.append(f"{count} effects of transactions that IK428 refused")
    return wrong, f"{2 * len(PORTS)} open claims"


def check_leases(cluster):
    """check_leases claims on one node, takes over on a second one, and completes on a third one."""
    wrong, count = [], 0
    sessions = {port: cluster.connect(port) for port in PORTS}
    scope = TENANT + "/check"

    def one(port, statement, *values):
        cursor = sessions[port].cursor()
        cursor.execute(statement, values)
        row = cursor.fetchone()
        sessions[port].commit()
        return row

    if len({one(port, "SELECT idempotency_internal.transaction_id()::text::bigint >> 48") for port in PORTS}) < len(PORTS):
        wrong.append("transactions of two nodes can have one id")
    for first in PORTS:
        for second in PORTS:
            for third in PORTS:
                key, count = f"lease {first} {second} {third}", count + 1
                claim = "SELECT o.outcome, o.token, o.recovery_point FROM idempotency.try_claim(%s, %s, lease => %s) AS o"
                _, old, _ = one(first, claim, scope, key, "1 minute")
                one(second, "SELECT idempotency.checkpoint(%s, %s, %s, 'half')", scope, key, old)
                if one(third, claim, scope, key, "1 minute")[0] != "in_progress":
                    wrong.append(f"{key}: a running lease was taken over")
                one(third, "SELECT idempotency.renew(%s, %s, %s, '1 millisecond')", scope, key, old)
                time.sleep(0.005)
                outcome, new, point = one(second, claim, scope, key, "1 minute")
                if (outcome, point) != ("taken_over", "half") or not new > old:
                    wrong.append(f"{key}: {outcome}, {point}, token {new} after {old}")
                for statement in ("SELECT idempotency.complete(%s, %s, '0', token => %s)", "SELECT idempotency.release(%s, %s, %s)",
                                  "SELECT idempotency.renew(%s, %s, %s, '1 minute')", "SELECT idempotency.checkpoint(%s, %s, %s, 'x')"):
                    if code(sessions[third], statement, scope, key, old) != "IK410":
                        wrong.append(f"{key}: {statement} with the token of the former owner")
                one(third, "SELECT idempotency.complete(%s, %s, '1', token => %s)", scope, key, new)
                if one(first, claim, scope, key, "1 minute")[0] != "replayed":
                    wrong.append(f"{key}: not replayed")
        one(first, "SELECT idempotency.try_claim(%s, %s, lease => '1 millisecond')", scope + " abandoned", str(first))
        time.sleep(0.005)
    for port in PORTS:
        if one(port, "SELECT count(*) FROM idempotency.claim_abandoned(%s, '1 minute')", scope + " abandoned") != (1,):
            wrong.append(f"{port}: claim_abandoned() found nothing")
    for session in sessions.values():
        session.close()
    return wrong, f"{count} orders of three nodes"


def check_waits(cluster):
    """check_waits lets a call on each node wait for a claim on each node."""
    wrong, scope = [], TENANT + "/wait"
    cluster.query(COORDINATOR, "INSERT INTO api.charge VALUES (%s, gen_random_uuid(), 'wait', 1)", TENANT)
    for owner_port in PORTS:
        for port in PORTS:
            owner, waiter, key, answer = cluster.connect(owner_port), cluster.connect(port), f"{owner_port} {port}", []
            waiter.autocommit = True
            owner.cursor().execute("SELECT idempotency.claim(%s, %s)", (scope, key))
            waiter.cursor().execute("SET statement_timeout = '10s'")  # ends a wait without a bound

            def wait(wait_for, answer=answer, waiter=waiter, key=key):
                began = time.monotonic()
                cursor = waiter.cursor()
                cursor.execute("SELECT o.outcome FROM idempotency.try_claim(%s, %s, wait => %s) AS o", (scope, key, wait_for))
                answer[:] = cursor.fetchone()[0], time.monotonic() - began

            for wait_for, least, most in (("0", 0, 1), ("300ms", 0.3, 2)):
                wait(wait_for)
                if answer[0] != "in_progress" or not least <= answer[1] <= most:
                    wrong.append(f"{key}: {answer} after {wait_for}")
            thread = threading.Thread(target=wait, args=("30s",))
            thread.start()
            time.sleep(0.2)
            owner.cursor().execute("SELECT idempotency.complete(%s, %s)", (scope, key))
            owner.commit()
            thread.join()
            if answer[0] != "replayed":
                wrong.append(f"{key}: {answer} after the owner had committed")
            # The bound applies to the claim only, on the node of the row, too.
            waiter.autocommit = False
            cursor = waiter.cursor()
            cursor.execute("SELECT idempotency.once(%s, %s)", (scope, key + " once"))
            cursor.execute("SELECT current_setting('lock_timeout'), (SELECT max(current_setting('lock_timeout')) FROM api.charge AS c"
                           " WHERE c.tenant = %s)", (TENANT,))
            timeouts = cursor.fetchone()
            if timeouts != ("0", "0"):
                wrong.append(f"{key}: lock_timeout is {timeouts} after a claim")
            waiter.commit()
            owner.close()
            waiter.close()
    return wrong, f"{len(PORTS) ** 2} pairs of nodes"


def check_inbox(cluster):
    """check_inbox records messages, and deletes expired keys, on each node."""
    wrong, scope = [], TENANT + "/inbox"
    for port in PORTS:
        rows = cluster.query(port, "SELECT * FROM idempotency.once_many(%s, ARRAY['c', 'a', %s])", scope, f"b{port}")
        if [row[0] for row in rows] != (["a", f"b{port}", "c"] if port == PORTS[0] else [f"b{port}"]):
            wrong.append(f"{port}: once_many() returned {rows}")
        cluster.query(port, "SELECT idempotency.once(i || '/short', 'k', '1 millisecond') FROM generate_series(1, 100) AS i")
        time.sleep(0.01)
        reaped = [cluster.query(port, "SELECT idempotency.reap(%s)", limit)[0][0] for limit in (30, None, 10)]
        if reaped != [30, 70, 0]:
            wrong.append(f"{port}: reap() deleted {reaped}")
    return wrong, f"{len(PORTS)} nodes"


def check_restored(cluster):
    """check_restored calls in transactions whose numbers the leases of others bear, as after the restore of a dump."""
    wrong, count, ahead = [], 0, 500
    for column in ("claimed_in", "proven_in"):
        for port in PORTS:
            scope = f"{TENANT}/restored {column} {port}"
            cluster.query(port, "SELECT count(idempotency.claim(%s, n::text, lease => '1 h')) FROM generate_series(1, %s) AS n", scope, ahead)
            now = cluster.query(port, "SELECT idempotency_internal.transaction_id()::text::bigint")[0][0]
            for number in ("claimed_in = NULL, proven_in = NULL", f"{column} = ({now} + key::bigint)::text::xid8"):
                cluster.query(COORDINATOR, f"UPDATE idempotency.key SET {number} WHERE tenant = %s AND scope = %s", TENANT, scope)
            session = cluster.connect(port)
            cursor = session.cursor()

            def answer(statement, *values, cursor=cursor):
                cursor.execute("SAVEPOINT s")
                try:
                    cursor.execute(statement, values)
                    return str(cursor.fetchone()[0])
                except psycopg2.Error as error:
                    return f"{error.pgcode} {error.diag.message_primary}"
                finally:
                    cursor.execute("ROLLBACK TO s")

            cursor.execute("SELECT idempotency_internal.transaction_id()::text::bigint")
            key = str(cursor.fetchone()[0] - now)
            if not 1 <= int(key) <= ahead:
                wrong.append(f"{port}: transaction {key} after the restore")
            busy = "IK409 an operation with this idempotency key is in progress"
            for statement, expected in (
                    ("SELECT idempotency.complete(%s, %s)", "IK412 this transaction holds no claim on this idempotency key"),
                    ("SELECT idempotency.fail(%s, %s, '{}', 422)", "IK412 this transaction holds no claim on this idempotency key"),
                    ("SELECT idempotency.release(%s, %s)", "IK412 this transaction holds no claim on this idempotency key"),
                    ("SELECT idempotency.claim(%s, %s, wait => '0')", busy),
                    ("SELECT idempotency.once_many(%s, ARRAY[%s])", busy),
                    ("SELECT idempotency.forget(%s, %s)", "True")):
                count += 1
                if answer(statement, scope, key) != expected:
                    wrong.append(f"{column} {port}: {statement}: {answer(statement, scope, key)}")
            cursor.execute("SELECT set_config('idempotency_internal.results', concat(chr(30), %s, chr(31), 'k', %s), true)", (scope, key))
            if answer("SELECT idempotency.current_key(%s)", scope) != "None":
                wrong.append(f"{column} {port}: a forged result counts")
            # its own lease, also from a subtransaction
            cursor.execute("SAVEPOINT own; SELECT idempotency.claim(%s, 'own', lease => '1 h'); RELEASE own", (scope,))
            if answer("SELECT idempotency.claim(%s, 'own')", scope) != "IK409 this transaction has claimed this idempotency key already":
                wrong.append(f"{column} {port}: claimed twice")
            if answer("SELECT idempotency.current_key(%s)", scope) != "own":
                wrong.append(f"{column} {port}: no current key")
            if answer("SELECT idempotency.complete(%s, 'own', '1')", scope) != "1":
                wrong.append(f"{column} {port}: {answer('SELECT idempotency.complete(%s, %s)', scope, 'own')}")
            session.close()
    return wrong, f"{count} calls"


def check_privileges(cluster):
    """check_privileges looks for rights that others than the owner and pg_monitor have on any node.

    Types are left out: Citus does not pass on a REVOKE for them.
    """
    wrong = []
    for port in PORTS:
        for kind, name, grantee in cluster.query(port, """
                SELECT DISTINCT o.kind, o.name, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
                FROM (
                    SELECT 'schema' AS kind, n.nspname::text AS name, n.oid AS schema, n.nspowner AS owner,
                        coalesce(n.nspacl, acldefault('n', n.nspowner)) AS acl
                    FROM pg_namespace AS n
                    UNION ALL
                    SELECT 'table', c.relname, c.relnamespace, c.relowner, c.relacl FROM pg_class AS c
                    UNION ALL
                    SELECT 'function', p.oid::regprocedure::text, p.pronamespace, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
                    FROM pg_proc AS p
                ) AS o CROSS JOIN LATERAL aclexplode(o.acl) AS a
                WHERE o.schema::regnamespace::text IN ('idempotency', 'idempotency_internal') AND a.grantee NOT IN (o.owner, 'pg_monitor'::regrole)
                ORDER BY 1, 2, 3"""):
            wrong.append(f"{port}: {grantee} has a right to {kind} {name}")
    return wrong, f"{len(PORTS)} nodes"


def check_roles(cluster):
    """check_roles calls as a client that has no right to the table."""
    wrong = []
    cluster.query(COORDINATOR, "CREATE ROLE client LOGIN")
    cluster.query(COORDINATOR, "SELECT idempotency.grant_client('client')")
    for port in PORTS:
        session = cluster.connect(port, user="client")
        if code(session, "SELECT idempotency.once(%s, %s)", TENANT + "/role", str(port)):
            wrong.append(f"{port}: a client cannot call once()")
        for statement in ("SELECT count(*) FROM idempotency.key", "SELECT idempotency.reap()",
                          "SELECT idempotency_internal.tenant('a')", "SELECT idempotency.distribute('api.charge')"):
            if code(session, statement) != "42501":
                wrong.append(f"{port}: a client can {statement}")
        session.close()
    return wrong, f"{len(PORTS)} nodes"


def check_owner(cluster):
    """check_owner charges as a client: with the rights of the owner, and with its own."""
    wrong, found = [], {}
    cluster.query(COORDINATOR, "GRANT USAGE ON SCHEMA api TO client")
    cluster.query(COORDINATOR, "GRANT SELECT, INSERT ON api.charge TO client")
    home = cluster.home(TENANT)[1]
    for definer in (True, False):
        for function in ("api.charge", "api.charge_here"):
            cluster.query(COORDINATOR, f"ALTER FUNCTION {function} SECURITY {'DEFINER' if definer else 'INVOKER'}")
            for port in PORTS:
                session = cluster.connect(port, user="client")
                key = f"owner {definer} {function} {port}"
                outcome = code(session, f"SELECT {function}(%s, %s, %s, 5)", TENANT, key, key)
                effects = number(cluster, "SELECT count(*) FROM api.charge WHERE order_no = %s", key)
                if outcome and effects:
                    wrong.append(f"{key}: {outcome}, {effects} effects")
                if definer and outcome:
                    wrong.append(f"{key}: {outcome}")
                if not definer:
                    found[f"{function} on {'coordinator' if port == COORDINATOR else 'home' if port == home else 'other'}"] = outcome
                session.close()
    return wrong, f"with the rights of the client: {found}"


def check_cost(cluster):
    """check_cost measures the write alone, with its key, and a replay, in microseconds.

    The figures are those of the fastest calls in twenty: other programs of the machine disturb the others.
    """
    figures = {}
    home = cluster.home(TENANT)[1]
    for place, port, form in (("home", home, "statement"), ("coordinator, delegated", COORDINATOR, "statement"),
                              ("coordinator, not delegated", COORDINATOR, "cast"), ("coordinator, in BEGIN", COORDINATOR, "block")):
        session = cluster.connect(port)
        for name, function, same in (("write", "api.write", False), ("charge", "api.charge", False), ("replay", "api.charge", True)):
            times = []
            for count in range(400):
                key = f"cost {place}" + ("" if same else f" {function} {count}")
                began = time.perf_counter()
                calls.call(session, form, function, TENANT, key, key, 5)
                times.append(time.perf_counter() - began)
            figures.setdefault(place, []).append(f"{name} {sorted(times)[len(times) // 20] * 1e6:.0f}")
        session.close()
    return [], "; ".join(f"{place}: {', '.join(values)}" for place, values in figures.items())


def check_again(cluster):
    """check_again distributes a second time, and tables that cannot be distributed."""
    wrong = []
    for table, expected in (("api.charge", "42P16"), ("pg_class", "42809")):
        session = cluster.connect(COORDINATOR)
        found = code(session, "SELECT idempotency.distribute(%s)", table)
        session.close()
        if found != expected:
            wrong.append(f"distribute('{table}'): {found}")
    return wrong, f"still on {len(WORKERS)} workers"
