from fastapi import Depends, FastAPI, Request
from pg_idempotency.starlette import IdempotencyMiddleware, transaction
from service_of_starlette import functions, made, parsed, run


def serve(service):
    app = FastAPI()
    for path, db, options, handler in service.routes():
        app.add_middleware(IdempotencyMiddleware, db=db, when=lambda request, path=path: request.url.path == path, **options)

        def endpoint(handler):
            async def answer(request: Request, tx=Depends(transaction)):
                return made(*await handler(await parsed(request), request.query_params, tx))

            return answer

        app.post(path)(endpoint(handler))
    for path, call in functions(service):
        call.__annotations__ = {"request": Request}
        app.add_route(path, call, methods=["POST"])
    run(app)
