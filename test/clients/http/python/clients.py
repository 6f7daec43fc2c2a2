"""The drivers and ORMs with which the services write. Each makes a Database, insert(tx, customer, amount), which returns the charge's id, and
elsewhere(customer, amount), which writes on another connection. An ORM writes with its own means."""

import contextlib
import functools
import os
import uuid

INSERT = "INSERT INTO charge (customer, amount) VALUES ({}) RETURNING id"


def psycopg(host):
    from psycopg import connect
    from pg_idempotency.psycopg import Database

    connect = functools.partial(connect, host=host, prepare_threshold=None)

    async def insert(tx, *charge):
        return tx.connection.execute(INSERT.format("%s, %s"), charge).fetchone()[0]

    async def elsewhere(*charge):
        with connect(autocommit=True) as connection:
            connection.execute(INSERT.format("%s, %s"), charge)

    return Database(connect), insert, elsewhere


def psycopg_async(host):
    from psycopg import AsyncConnection
    from pg_idempotency.psycopg import AsyncDatabase

    connect = functools.partial(AsyncConnection.connect, host=host, prepare_threshold=None)

    async def insert(tx, *charge):
        return (await (await tx.connection.execute(INSERT.format("%s, %s"), charge)).fetchone())[0]

    async def elsewhere(*charge):
        async with await connect(autocommit=True) as connection:
            await connection.execute(INSERT.format("%s, %s"), charge)

    return AsyncDatabase(connect), insert, elsewhere


def asyncpg(host):
    from asyncpg import connect
    from pg_idempotency.asyncpg import Database

    @contextlib.asynccontextmanager
    async def acquire():
        connection = await connect(host=host, statement_cache_size=0)
        try:
            yield connection
        finally:
            await connection.close()

    async def insert(tx, *charge):
        return await tx.connection.fetchval(INSERT.format("$1, $2"), *charge)

    async def elsewhere(*charge):
        async with acquire() as connection:
            await connection.execute(INSERT.format("$1, $2"), *charge)

    return Database(acquire), insert, elsewhere


def model():
    from sqlalchemy import BigInteger, Column, Integer, Text
    from sqlalchemy.orm import declarative_base

    class Charge(declarative_base()):
        __tablename__ = "charge"
        id = Column(Integer, primary_key=True)
        customer = Column(Text)
        amount = Column(BigInteger)

    return Charge


def sqlalchemy(host):
    import sqlalchemy
    from pg_idempotency.sqlalchemy import Database
    from sqlalchemy import create_engine
    from sqlalchemy.orm import sessionmaker
    from sqlalchemy.pool import NullPool

    Charge = model()
    # SQLAlchemy 1.4 does not know psycopg 3.
    url, options = ("postgresql+psycopg2://", {}) if sqlalchemy.__version__ < "2" else ("postgresql+psycopg://", {"prepare_threshold": None})
    sessions = sessionmaker(create_engine(url, connect_args={"host": host, **options}, poolclass=NullPool))

    async def insert(tx, customer, amount):
        tx.connection.add(charge := Charge(customer=customer, amount=amount))
        tx.connection.flush()
        return charge.id

    async def elsewhere(customer, amount):
        with sessions.begin() as session:
            session.add(Charge(customer=customer, amount=amount))

    return Database(sessions), insert, elsewhere


def sqlalchemy_async(host):
    import sqlalchemy
    from pg_idempotency.sqlalchemy import AsyncDatabase
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
    from sqlalchemy.orm import sessionmaker
    from sqlalchemy.pool import NullPool

    Charge = model()
    # SQLAlchemy 1.4 gives prepared statements the same names in each connection, which PgBouncer mixes.
    names = {} if sqlalchemy.__version__ < "2" else {"prepared_statement_name_func": lambda: f"p{uuid.uuid4()}"}
    arguments = {"host": host, "statement_cache_size": 0, **names}
    sessions = sessionmaker(create_async_engine("postgresql+asyncpg://", connect_args=arguments, poolclass=NullPool), class_=AsyncSession)

    async def insert(tx, customer, amount):
        tx.connection.add(charge := Charge(customer=customer, amount=amount))
        await tx.connection.flush()
        return charge.id

    async def elsewhere(customer, amount):
        async with sessions() as session, session.begin():
            session.add(Charge(customer=customer, amount=amount))

    return AsyncDatabase(sessions), insert, elsewhere


@functools.lru_cache
def django_charge():
    """Configures Django, and returns the model of a charge. The database "default" is that of PGHOST, and "other" the same again."""
    import django
    from django.conf import settings

    def database(host):
        return {"ENGINE": "django.db.backends.postgresql", "HOST": host, "NAME": os.environ["PGDATABASE"], "USER": os.environ["PGUSER"],
                "DISABLE_SERVER_SIDE_CURSORS": True}

    settings.configure(
        DATABASES={"default": database(os.environ["PGHOST"]), "other": database(os.environ["PGHOST"]), "nonexistent": database("/nonexistent")},
        USE_TZ=True, ROOT_URLCONF="service_of_django", ALLOWED_HOSTS=["*"], SECRET_KEY="test", LOGGING_CONFIG=None)
    django.setup()
    from django.db import models

    class Charge(models.Model):
        customer = models.TextField()
        amount = models.BigIntegerField()

        class Meta:
            app_label = "test"
            db_table = "charge"

    return Charge


def django(host):
    Charge = django_charge()
    from pg_idempotency.django import Database

    async def insert(tx, customer, amount):
        return Charge.objects.create(customer=customer, amount=amount).pk

    async def elsewhere(customer, amount):
        Charge.objects.using("other").create(customer=customer, amount=amount)

    return Database("default" if host == os.environ["PGHOST"] else "nonexistent"), insert, elsewhere


CLIENTS = {each.__name__: each for each in (psycopg, psycopg_async, asyncpg, sqlalchemy, sqlalchemy_async, django)}
