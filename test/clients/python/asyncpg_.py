"""asyncpg, with its own transactions."""

import asyncio
import json

import asyncpg

import client

run = asyncio.new_event_loop().run_until_complete


class Block:
    """A transaction, or within one a savepoint."""

    def __init__(self, connection):
        self.transaction = connection.transaction()
        run(self.transaction.start())

    def commit(self):
        run(self.transaction.commit())

    def rollback(self):
        run(self.transaction.rollback())


class Session:
    def __init__(self, name, host, prepared):
        self.connection = run(asyncpg.connect(host=host, statement_cache_size=100 if prepared else 0))

    def block(self):
        return Block(self.connection)

    def query(self, sql, arguments):
        return run(self.connection.fetch(sql, *arguments))


client.serve(Session, lambda error: getattr(error, "sqlstate", None), wrap=json.dumps)
