"""psycopg2. It has no blocks for one transaction of an autocommit connection, so that autocommit changes."""

import psycopg2
import psycopg2.extras

import client

psycopg2.extras.register_uuid()


class Transaction:
    def __init__(self, connection):
        self.connection = connection
        connection.autocommit = False

    def commit(self):
        try:
            self.connection.commit()
        finally:
            self.rollback()

    def rollback(self):
        self.connection.rollback()
        self.connection.autocommit = True


class Savepoint:
    def __init__(self, connection):
        self.connection = connection
        connection.cursor().execute("SAVEPOINT s")

    def rollback(self):
        self.connection.cursor().execute("ROLLBACK TO SAVEPOINT s")


class Session:
    def __init__(self, name, host, prepared):
        self.connection = psycopg2.connect(host=host)
        self.connection.autocommit = True

    def block(self):
        return (Transaction if self.connection.autocommit else Savepoint)(self.connection)

    def query(self, sql, arguments):
        cursor = self.connection.cursor()
        cursor.execute(sql, arguments)
        return cursor.fetchall() if cursor.description else []


client.serve(Session, lambda error: getattr(error, "pgcode", None), wrap=psycopg2.extras.Json)
