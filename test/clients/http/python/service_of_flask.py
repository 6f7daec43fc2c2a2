import flask
from pg_idempotency.core import run_sync
from pg_idempotency.flask import idempotent
from werkzeug.serving import make_server


def made(status, headers, body):
    """Returns the response of Flask."""
    if body is None or isinstance(body, bytes) or hasattr(body, "__next__"):
        response = flask.Response(body, status)
        del response.headers["Content-Type"]
    else:
        response = flask.make_response(flask.jsonify(body), status)
    for name, value in headers.items():
        response.headers[name] = value
    return response


def serve(service):
    app = flask.Flask(__name__)
    app.logger.disabled = True
    for path, db, options, handler in service.routes():
        @idempotent(db, **options)
        def answer(tx, handler=handler):
            body = flask.request.get_json() if flask.request.is_json and flask.request.get_data() else None
            return made(*run_sync(handler(body, flask.request.args, tx)))

        app.add_url_rule(path, path, answer, methods=["POST"])
    for path in service.paths:
        def call(path=path):
            status, body = run_sync(service.call(path, flask.request.get_json()))
            return body, status

        app.add_url_rule(path, path, call, methods=["POST"])
    from werkzeug.serving import WSGIRequestHandler

    WSGIRequestHandler.log_request = lambda *arguments: None
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()
