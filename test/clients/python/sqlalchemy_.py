"""SQLAlchemy with psycopg2: charges are objects of an ORM session."""

import json

import psycopg2.extras
from sqlalchemy import BigInteger, Column, Integer, Text, create_engine, text
from sqlalchemy.orm import Session as OrmSession
from sqlalchemy.orm import declarative_base
from sqlalchemy.pool import NullPool

import client

psycopg2.extras.register_uuid()
Base = declarative_base()


class Charge(Base):
    __tablename__ = "charge"
    id = Column(Integer, primary_key=True)
    customer = Column(Text)
    amount = Column(BigInteger)


class Block:
    """A transaction, or within one a savepoint. A commit that fails leaves the session in its transaction."""

    def __init__(self, orm):
        self.orm = orm
        self.transaction = orm.begin_nested() if orm.in_transaction() else orm.begin()

    def commit(self):
        try:
            self.transaction.commit()
        except Exception:
            self.rollback()
            raise

    def rollback(self):
        self.transaction.rollback()


class Session:
    def __init__(self, name, host, prepared):
        engine = create_engine("postgresql+psycopg2://", connect_args={"host": host}, poolclass=NullPool)
        self.orm = OrmSession(engine)
        self.alone = engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def block(self):
        return Block(self.orm)

    def query(self, sql, arguments):
        where = self.orm if self.orm.in_transaction() else self.alone
        result = where.execute(text(sql), {f"p{number}": value for number, value in enumerate(arguments, 1)})
        return result.fetchall() if result.returns_rows else []

    def insert(self, customer, amount):
        self.orm.add(Charge(customer=customer, amount=amount))
        self.orm.flush()


client.serve(Session, lambda error: getattr(getattr(error, "orig", None), "pgcode", None), wrap=json.dumps)
