import json
import logging
import socketserver
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path as url
from pg_idempotency.core import run_sync
from pg_idempotency.django import idempotent

urlpatterns = []


def made(status, headers, body):
    """Returns the response of Django."""
    if body is None or isinstance(body, bytes) or hasattr(body, "__next__"):
        response = (StreamingHttpResponse if hasattr(body, "__next__") else HttpResponse)(body or b"", status=status)
        del response["Content-Type"]
    else:
        response = JsonResponse(body, status=status)
    for name, value in headers.items():
        response[name] = value
    return response


class Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 100


class Handler(WSGIRequestHandler):
    def log_message(self, *arguments):
        pass


def serve(service):
    logging.disable()
    for path, db, options, handler in service.routes():
        @idempotent(db, **options)
        def answer(request, handler=handler):
            body = json.loads(request.body or b"null") if "json" in request.headers.get("Content-Type", "") else None
            return made(*run_sync(handler(body, request.GET, request.idempotency)))

        urlpatterns.append(url(path[1:], answer))
    for path in service.paths:
        def call(request, path=path):
            status, body = run_sync(service.call(path, json.loads(request.body)))
            return JsonResponse(body, status=status)

        urlpatterns.append(url(path[1:], call))
    with Server(("127.0.0.1", 0), Handler) as server:
        server.set_app(get_wsgi_application())
        print(server.server_port, flush=True)
        server.serve_forever()
