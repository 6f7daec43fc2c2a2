"""psycopg 3, with its own transaction blocks."""

import psycopg
from psycopg.types.json import Json

import client


class Block:
    """A transaction, or a savepoint: conn.transaction() outside of a with statement."""

    def __init__(self, connection):
        self.transaction = connection.transaction()
        self.transaction.__enter__()

    def commit(self):
        self.transaction.__exit__(None, None, None)

    def rollback(self):
        undo = psycopg.Rollback()
        self.transaction.__exit__(type(undo), undo, None)


class Session:
    def __init__(self, name, host, prepared):
        self.connection = psycopg.connect(host=host, autocommit=True, prepare_threshold=0 if prepared else None)

    def block(self):
        return Block(self.connection)

    def query(self, sql, arguments):
        cursor = self.connection.execute(sql, arguments)
        return cursor.fetchall() if cursor.description else []


client.serve(Session, lambda error: getattr(error, "sqlstate", None), wrap=Json)
