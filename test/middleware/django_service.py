"""The service of test/middleware/run with Django."""

import json
import logging
import os
import re
import socketserver
import sys
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../examples/middleware"))


def database(host):
    return {"ENGINE": "django.db.backends.postgresql", "HOST": host, "NAME": os.environ["PGDATABASE"], "USER": os.environ["PGUSER"]}


settings.configure(
    DATABASES={"default": database(os.environ["PGHOST"]), "other": database(os.environ["PGHOST"]), "nonexistent": database("/nonexistent")}, USE_TZ=True,
    ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="test", LOGGING_CONFIG=None)
django.setup()
logging.disable()

from django.db import DatabaseError, connection, models  # noqa: E402  Django must be configured first
from idempotent_django import idempotent  # noqa: E402


class Charge(models.Model):
    customer = models.TextField()
    amount = models.BigIntegerField()

    class Meta:
        app_label = "test"
        db_table = "charge"


def charge(request):
    body = json.loads(request.body)
    action = body.get("action")
    if action == "elsewhere":
        try:
            Charge.objects.using("other").create(customer=body["customer"], amount=body["amount"])
        except DatabaseError as error:
            return JsonResponse({"error": error.__cause__.pgcode}, status=500)
        raise RuntimeError("a bug after the write")
    made = Charge.objects.create(customer=body["customer"], amount=body["amount"])
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(%s), (SELECT count(*) FROM trouble) > 0", [1 if action == "slow" else 0])
        trouble = cursor.fetchone()[1]
        if re.fullmatch("[0-9A-Z]{5}", action or ""):
            cursor.execute("SELECT fail_with(%s)", [action])
    if action == "decline":
        return JsonResponse({"error": "card_declined"}, status=402)
    if action == "overload":
        return JsonResponse({"error": "overload"}, status=503)
    if action == "crash" and trouble:
        raise RuntimeError("a bug")
    return JsonResponse({"id": made.id, "customer": made.customer}, status=201, headers={"Location": f"/charges/{made.id}"})


urlpatterns = [
    path("charges", idempotent()(charge)),
    path("lenient", idempotent(lenient=True, scope="lenient")(charge)),
    path("waiting", idempotent(wait="30 seconds")(charge)),
    path("unavailable", idempotent(using="nonexistent")(charge)),
]


class Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Handler(WSGIRequestHandler):
    def log_message(self, *arguments):
        pass


with Server(("127.0.0.1", 0), Handler) as server:
    server.set_app(get_wsgi_application())
    print(server.server_port, flush=True)
    server.serve_forever()
