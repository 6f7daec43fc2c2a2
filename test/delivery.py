#!/usr/bin/python3
"""test/delivery.py SEED SECONDS

Random sessions of delivery against a model, in the database that PGDATABASE names, with the
edition that is installed there. Publishers commit late, roll back, use savepoints and prepared
transactions; consumers acknowledge, fail, give back, extend and forget batches, or call deliver(); an
operator redrives, discards, pauses, seeks, reaps, and changes partitions and topics; an administrator
vacuums and reindexes; another session terminates them at random statements. What was published and what took effect is written in the same
transactions. Then all events are drained, and each subscription must have, of the topic that it
always had: every event once, or as a dead letter that was discarded; the events of an aggregate in
their order; nothing else.
"""

import random
import sys
import threading
import time

import psycopg2

SEED, SECONDS = int(sys.argv[1]), float(sys.argv[2])
SUBSCRIPTIONS = ('one', 'many', 'sought', 'late')
AGGREGATES = 12
SCHEMA = """
GRANT pg_read_all_settings TO model_client;
SELECT idempotency.grant_client('model_client'), idempotency.grant_client('model_consumer'), idempotency.grant_consumer('model_consumer');
CREATE TABLE aggregate (name text PRIMARY KEY, version int NOT NULL DEFAULT 0);
INSERT INTO aggregate SELECT 'a' || n FROM generate_series(1, %d) AS n;
CREATE TABLE sent (id uuid PRIMARY KEY, topic text, aggregate text, version int, n int, ordered boolean, begun timestamptz);
CREATE TABLE effect (number bigserial, subscription text, id uuid);
CREATE TABLE died (subscription text, id uuid);
CREATE TABLE discarded (subscription text, id uuid);
GRANT ALL ON aggregate, sent, effect, died, discarded, effect_number_seq TO model_client, model_consumer;
GRANT SELECT ON idempotency.dead_letters TO model_consumer;
CREATE FUNCTION bury() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS
	'BEGIN INSERT INTO public.died VALUES (NEW.subscription, NEW.id); RETURN NULL; END';
CREATE TRIGGER bury AFTER INSERT OR UPDATE ON idempotency.parked FOR EACH ROW WHEN (NEW.dead_at IS NOT NULL) EXECUTE FUNCTION bury();
""" % AGGREGATES
HANDLER = """CREATE FUNCTION handle_%s(e idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	dice float8 := random();
BEGIN
	INSERT INTO effect (subscription, id) VALUES ('%s', e.id);
	IF dice < 0.05 THEN
		RAISE 'no';
	ELSIF dice < 0.06 THEN
		RAISE SQLSTATE 'IKFIN';
	ELSIF dice > 0.95 THEN
		PERFORM pg_sleep(dice - 0.95);
	END IF;
END $$"""

stop = threading.Event()
trouble = []
counts = {}
late_since = None


def known():
    return SUBSCRIPTIONS if late_since else SUBSCRIPTIONS[:3]


def count(what, number=1):
    counts[what] = counts.get(what, 0) + number


class Session:
    """A connection that is opened again when it was terminated."""

    def __init__(self, role, random_):
        self.role, self.random, self.connection = role, random_, None

    def run(self, work):
        """Calls work(execute) in a transaction; returns whether it committed for certain."""
        try:
            if self.connection is None or self.connection.closed:
                self.connection = psycopg2.connect('', user=self.role)
            cursor = self.connection.cursor()

            def execute(query, *values):
                cursor.execute(query, values)
                return cursor.fetchall() if cursor.description else []
            done = work(execute)
            if done is False:
                self.connection.rollback()
            else:
                self.connection.commit()
            return True
        except psycopg2.Error as error:
            code = error.pgcode or 'lost'
            count(code)
            # IK408: the batch is another one's; 55P03: in use; 57P01, lost: terminated
            if code not in ('IK408', '55P03', '57P01', '40P01', 'lost', '55000', '42704'):
                trouble.append('%s: %s' % (code, error))
                stop.set()
            try:
                self.connection.rollback()
            except (psycopg2.Error, AttributeError):
                self.connection = None
            return False


def publisher(number):
    random_ = random.Random(SEED * 100 + number)
    session = Session('model_client', random_)

    def publish(execute, topic, aggregate, version, n, ordered=True):
        delay = None if ordered else '%d ms' % random_.randrange(100)
        row = execute("SELECT idempotency.publish(%s, json_build_object('n', %s::int), %s, deliver_at => clock_timestamp() + %s::interval)",
                      topic, n, aggregate, delay)
        execute('INSERT INTO sent VALUES (%s, %s, %s, %s, %s, %s, now())', row[0][0], topic, aggregate, version, n, ordered)

    def transaction(execute):
        if random_.random() < .3:
            execute('SELECT pg_current_xact_id()')
        if random_.random() < .2:
            time.sleep(random_.random() * .05)
        for name in sorted(random_.sample(range(1, AGGREGATES + 1), random_.choice((1, 1, 1, 2, 3)))):
            version = execute("UPDATE aggregate SET version = version + 1 WHERE name = %s RETURNING version", 'a%d' % name)[0][0]
            if random_.random() < .2:
                execute('SAVEPOINT s')
                publish(execute, 't.free', None, 0, 0)
                execute(random_.choice(('ROLLBACK TO s', 'RELEASE s')))
            for n in range(random_.choice((1, 1, 2, 5))):
                publish(execute, random_.choice(('t.a', 't.b', 'u')), 'a%d' % name, version, n, random_.random() > .05)
                if random_.random() < .03:
                    time.sleep(random_.random() * (1 if random_.random() < .1 else .1))
        if random_.random() < .03:
            name = 'p%s' % random_.random()
            execute('PREPARE TRANSACTION %s', name)
            session.connection.autocommit = True
            time.sleep(random_.random() * .3)
            execute(random_.choice(('COMMIT', 'COMMIT', 'ROLLBACK')) + ' PREPARED %s', name)
            session.connection.autocommit = False
        return random_.random() > .15
    while not stop.is_set():
        session.run(transaction)
        if session.connection is not None and not session.connection.closed:
            session.connection.autocommit = False
        time.sleep(random_.random() * .01)


def consume(session, subscription, quick=False):
    """One batch; returns whether there was one."""
    random_ = session.random
    one_transaction = not quick and random_.random() < .3
    events = []

    def fetch(execute):
        if not quick and random_.random() < .2:
            execute('SELECT pg_current_xact_id()')
        if not quick and random_.random() < .05:
            execute("INSERT INTO sent VALUES (idempotency.publish('u', '1'), 'u')")
        events.extend(execute('SELECT batch, id, aggregate_id, seq FROM idempotency.fetch(%s, %s, lease => %s, wait => %s, max_bytes => %s)', subscription,
                              random_.choice((1, 3, 10, 100)), '20 s' if quick else random_.choice(('60 ms', '300 ms', '2 s')),
                              '%d ms' % random_.choice((0, 0, 20)), random_.choice((1, 50, 10000000))))
        return finish(execute) if one_transaction and events else None

    def finish(execute):
        if quick:
            how = 1
        else:
            how = random_.random()
        if how < .05:
            raise Forget()
        if how < .1:
            execute('SELECT idempotency.nack(%s, %s, NULL)', subscription, events[0][0])
            return None
        if not quick and random_.random() < .1:
            execute('SELECT idempotency.extend(%s, %s, %s)', subscription, events[0][0], random_.choice(('1 ms', '2 s')))
        behind, handled = set(), []
        for batch, id_, aggregate, seq in events:
            if aggregate in behind:
                continue
            if not quick and random_.random() < .08:
                dead = random_.random() < .1
                execute("SELECT idempotency.nack(%s, %s, %s, 'failed', %s, %s)", subscription, batch, id_,
                        random_.choice((None, '0', '30 ms')), dead)
                if aggregate is not None:
                    behind.add(aggregate)
                count('nack')
            else:
                execute('INSERT INTO effect (subscription, id) VALUES (%s, %s)', subscription, id_)
                handled.append(seq)
                if not quick and random_.random() < .03:
                    time.sleep(random_.random() * .1)
            if handled and not quick and random_.random() < .05:
                execute('SELECT idempotency.ack(%s, %s, %s)', subscription, batch, handled)
                handled = []
        left = execute('SELECT idempotency.ack(%s, %s)', subscription, events[0][0])[0][0]
        if left != len(handled):
            trouble.append('%s: acknowledged %s of %s' % (subscription, left, len(handled)))
            stop.set()
        count('ack', left)
        return None if quick or random_.random() > .03 else False
    try:
        session.run(fetch)
        if events and not one_transaction:
            if not quick and random_.random() < .1:
                time.sleep(random_.random() * .2)
            session.run(finish)
    except Forget:
        session.connection.rollback()
    return bool(events)


def deliver(session, subscription):
    """Some events, by deliver(), which commits."""
    random_ = session.random

    def call(execute):
        session.connection.rollback()
        session.connection.autocommit = True
        execute("CALL idempotency.deliver(%s, %s::regprocedure, %s, %s, lease => %s)", subscription, 'handle_%s(idempotency.event)' % subscription,
                random_.choice((1, 3, 100)), '%d ms' % random_.choice((50, 400)), random_.choice(('60 ms', '2 s')))
        count('deliver')
    session.run(call)
    if session.connection is not None and not session.connection.closed:
        session.connection.autocommit = False


class Forget(Exception):
    """The consumer forgets its batch."""


def consumer(number):
    random_ = random.Random(SEED * 100 + 20 + number)
    session = Session('model_consumer', random_)
    while not stop.is_set():
        if random_.random() < .1:
            deliver(session, random_.choice(known()))
        elif not consume(session, random_.choice(known())):
            time.sleep(random_.random() * .01)


def operator():
    global late_since
    random_ = random.Random(SEED * 100 + 50)
    session = Session('model_consumer', random_)
    owner = Session('postgres', random_)
    begun = time.time()

    def act(execute):
        name = random_.choice(known())
        what = random_.choice(('redrive', 'redrive', 'discard', 'pause', 'partitions', 'topics', 'seek', 'reap'))
        count(what)
        if what == 'redrive':
            execute('SELECT idempotency.redrive(%s)', name)
        elif what == 'discard':
            for row in execute('SELECT event_id FROM idempotency.dead_letters WHERE subscription = %s', name):
                if execute('SELECT idempotency.discard(%s, %s)', name, row[0])[0][0] > 0:
                    execute('INSERT INTO discarded VALUES (%s, %s)', name, row[0])
        elif what == 'pause':
            execute(random_.choice(('SELECT idempotency.pause(%s)', 'SELECT idempotency.resume(%s)')), name)
        elif what == 'partitions':
            execute('SELECT idempotency.alter_subscription(%s, partitions => %s)', name, random_.choice((1, 2, 3, 5)))
        elif what == 'topics':
            execute('SELECT idempotency.alter_subscription(%s, topics => %s)', name, random_.choice((['t.*'], ['t.*', 'u'])))
        elif what == 'seek':
            execute('SELECT idempotency.seek(%s, %s)', 'sought', random_.choice(('beginning', 'now', '2020-01-01')))

    while not stop.is_set():
        if late_since is None and time.time() - begun > SECONDS / 3:
            if session.run(lambda execute: execute("SELECT idempotency.subscribe('late', '{t.*}', partitions => 2, retry_delay => '10 ms')") and None):
                late_since = owner.run(lambda execute: None) and time.time()
        session.run(act)
        owner.run(lambda execute: execute('SELECT idempotency.reap(1000)') and None)
        time.sleep(random_.random() * .2)
    for name in known():
        while not session.run(lambda execute, name=name: execute('SELECT idempotency.resume(%s)', name) and None) and not trouble:
            time.sleep(.01)


def administrator():
    random_ = random.Random(SEED * 100 + 70)
    session = Session('postgres', random_)

    def act(execute):
        session.connection.autocommit = True
        execute(random_.choice(('VACUUM', 'REINDEX TABLE CONCURRENTLY')) + ' idempotency.' + random_.choice(('outbox', 'position', 'parked')))
    while not stop.is_set():
        session.run(act)
        time.sleep(random_.random())


def killer():
    random_ = random.Random(SEED * 100 + 60)
    session = Session('postgres', random_)
    while not stop.is_set():
        time.sleep(random_.random() * .15)
        session.run(lambda execute: execute("""SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND usename LIKE 'model_%%' ORDER BY random() LIMIT 1""") and None)
        count('terminated')


def end_prepared(cursor, age='1 s'):
    cursor.execute('SELECT gid FROM pg_prepared_xacts WHERE database = current_database()'
                   ' AND prepared < clock_timestamp() - %s::interval', (age,))
    for row in cursor.fetchall():
        try:
            cursor.execute('COMMIT PREPARED %s', row)
        except psycopg2.Error:
            pass


def check(execute):
    """What is wrong with the effects."""
    wrong = []
    for name in set(known()) - {'sought'}:
        for title, query in (
                ('lost', """SELECT count(*) FROM sent WHERE topic <> 'u' AND (%(name)s <> 'late' OR begun > to_timestamp(%(since)s))
                    AND id NOT IN (SELECT id FROM effect WHERE subscription = %(name)s)
                    AND id NOT IN (SELECT id FROM discarded WHERE subscription = %(name)s)"""),
                ('twice', "SELECT count(*) - count(DISTINCT id) FROM effect WHERE subscription = %(name)s"),
                ('after discard', """SELECT count(*) FROM effect JOIN discarded USING (subscription, id) WHERE subscription = %(name)s"""),
                ('never published', """SELECT count(*) FROM effect WHERE subscription = %(name)s AND id NOT IN (SELECT id FROM sent)"""),
                ('out of order', """SELECT count(*) FROM (SELECT (version, n) < lag((version, n)) OVER (PARTITION BY aggregate ORDER BY number) AS late
                    FROM effect JOIN sent USING (id) WHERE subscription = %(name)s AND aggregate IS NOT NULL AND ordered
                        AND id NOT IN (SELECT id FROM died WHERE subscription = %(name)s)) AS o WHERE late"""),
                ('parked', 'SELECT count(*) FROM idempotency.parked WHERE subscription = %(name)s'),
                ('old partitions', 'SELECT count(*) FROM idempotency.partition WHERE subscription = %(name)s AND stop IS NOT NULL')):
            number = execute(query, {'name': name, 'since': late_since or 0})[0][0]
            if number:
                wrong.append('%s: %s %s' % (name, number, title))
    return wrong


def main():
    random.seed(SEED)
    owner = psycopg2.connect('', user='postgres')
    owner.autocommit = True
    cursor = owner.cursor()
    for role in ('model_client', 'model_consumer'):
        cursor.execute('SELECT FROM pg_roles WHERE rolname = %s', (role,))
        if not cursor.rowcount:
            cursor.execute('CREATE ROLE ' + role + ' LOGIN')
    cursor.execute(SCHEMA)
    reaps = SEED % 2 == 0
    cursor.execute("SELECT format('ALTER DATABASE %%I SET idempotency.outbox_retention = %%L', current_database(), %s)", ('0' if reaps else '-1',))
    cursor.execute(cursor.fetchone()[0])

    setup = Session('model_consumer', random)
    for name in SUBSCRIPTIONS:
        cursor.execute(HANDLER % (name, name))
    for name, partitions in (('one', 1), ('many', 4), ('sought', 2)):
        setup.run(lambda execute: execute("SELECT idempotency.subscribe(%s, '{t.*}', partitions => %s, max_attempts => 3, retry_delay => '10 ms')",
                                          name, partitions) and None)
    threads = [threading.Thread(target=publisher, args=(i,)) for i in range(5)]
    threads += [threading.Thread(target=consumer, args=(i,)) for i in range(5)]
    threads += [threading.Thread(target=work) for work in (operator, administrator, killer)]
    for thread in threads:
        thread.start()
    begun = time.time()
    while time.time() < begun + SECONDS and not stop.wait(1):
        end_prepared(cursor)
    stop.set()
    # Sessions that were terminated left transactions prepared, for which others wait
    while any(thread.is_alive() for thread in threads):
        end_prepared(cursor)
        time.sleep(.1)
    end_prepared(cursor, '0')

    # Drain, with dead letters, until nothing comes for a second
    session = Session('model_consumer', random)
    quiet = time.time()
    deadline = time.time() + 120
    while time.time() - quiet < 1.5 and time.time() < deadline and not trouble:
        for name in known():
            redriven = []
            session.run(lambda execute, name=name: redriven.append(execute('SELECT idempotency.redrive(%s)', name)[0][0]))
            while consume(session, name, True):
                quiet = time.time()
            cursor.execute("SELECT count(*) FROM idempotency.parked WHERE subscription = %s", (name,))
            if cursor.fetchone()[0] or redriven[0]:
                quiet = max(quiet, time.time() - 1)
            cursor.execute("SELECT count(*) FROM idempotency.position WHERE subscription = %s AND batch IS NOT NULL AND leased_until > clock_timestamp()", (name,))
            if cursor.fetchone()[0]:
                quiet = time.time()
        time.sleep(.02)
    wrong = check(lambda query, values: cursor.execute(query, values) or cursor.fetchall())

    # From the beginning again
    if not reaps and not trouble:
        cursor.execute("DELETE FROM effect WHERE subscription = 'one'")
        cursor.execute("DELETE FROM died WHERE subscription = 'one'")
        cursor.execute("DELETE FROM discarded WHERE subscription = 'one'")
        session.run(lambda execute: execute("SELECT idempotency.seek('one', 'beginning')") and None)
        for _ in range(50):
            while consume(session, 'one', True):
                pass
            time.sleep(.01)
        wrong += ['from the beginning: ' + line for line in check(lambda query, values: cursor.execute(query, values) or cursor.fetchall())]

    cursor.execute('SELECT (SELECT count(*) FROM sent), (SELECT count(*) FROM effect), (SELECT count(*) FROM idempotency.outbox)')
    rows = cursor.fetchone()
    print('seed', SEED, 'sent, effects, rows:', *rows, dict(sorted(counts.items())))
    print('counts: operations=%d faults=%d violations=%d' % (rows[0] + rows[1], counts.get('terminated', 0), len(trouble + wrong)))
    for line in trouble + wrong:
        print('FAILED', line)
    sys.exit(1 if trouble or wrong else 0)


main()
