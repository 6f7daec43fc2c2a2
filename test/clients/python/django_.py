"""Django's ORM with psycopg2: charges are objects of a model."""

import json
import os

import django
from django.conf import settings

import client



def database(host):
    return {"ENGINE": "django.db.backends.postgresql", "HOST": host, "NAME": os.environ["PGDATABASE"],
            "USER": os.environ["PGUSER"], "DISABLE_SERVER_SIDE_CURSORS": True}


hosts = os.environ["PGHOST"], os.environ["POOLER"]
settings.configure(USE_TZ=True, DATABASES={"default": {}, **{host + name: database(host) for host in hosts for name in "ab"}})
django.setup()

from django.db import connections, models, transaction  # noqa: E402  Django must be configured first


class Charge(models.Model):
    customer = models.TextField()
    amount = models.BigIntegerField()

    class Meta:
        app_label = "clients"
        db_table = "charge"


class Block:
    """A transaction, or within one a savepoint: atomic() outside of a with statement."""

    def __init__(self, name):
        self.name = name
        self.atomic = transaction.atomic(using=name)
        self.atomic.__enter__()

    def commit(self):
        self.atomic.__exit__(None, None, None)

    def rollback(self):
        undo = RuntimeError()
        self.atomic.__exit__(type(undo), undo, None)


class Session:
    def __init__(self, name, host, prepared):
        self.name = host + name

    def block(self):
        return Block(self.name)

    def query(self, sql, arguments):
        with connections[self.name].cursor() as cursor:
            cursor.execute(sql, arguments)
            return cursor.fetchall() if cursor.description else []

    def insert(self, customer, amount):
        Charge.objects.using(self.name).create(customer=customer, amount=amount)


client.serve(Session, lambda error: getattr(error.__cause__, "pgcode", None), wrap=json.dumps)
