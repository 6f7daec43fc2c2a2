// An interceptor for NestJS, on Express or Fastify. Create the application with { rawBody: true }. The
// route's method runs in the transaction, which it gets by transaction(). An HttpException is an answer, so
// exception filters do not see it.

"use strict";

const { AsyncLocalStorage } = require("async_hooks");
const { HttpException, StreamableFile } = require("@nestjs/common");
const { RESPONSE_PASSTHROUGH_METADATA, ROUTE_ARGS_METADATA } = require("@nestjs/common/constants");
const { RouteParamtypes } = require("@nestjs/common/enums/route-paramtypes.enum");
const { idempotency } = require("./http.js");

const current = new AsyncLocalStorage();

// session returns the session of the request, for calls of this package.
function session() {
	const found = current.getStore();
	if (found === undefined)
		throw new Error("no transaction: the route has no IdempotencyInterceptor, or this call outlived it");
	return found;
}

// transaction returns the ORM's transaction of the request.
const transaction = () => session().tx;

// last returns the value of an Observable, which a route's method returns.
const last = (observable) => new Promise((resolve, reject) => {
	let value;
	observable.subscribe({ next: (each) => { value = each; }, error: reject, complete: () => resolve(value) });
});

// sendsItself tells whether a route's method has @Res() or @Next(), with which Nest lets it send the answer.
function sendsItself(type, name) {
	const taken = Object.keys(Reflect.getMetadata(ROUTE_ARGS_METADATA, type, name) ?? {}).map((parameter) => Number(parameter.split(":")[0]));
	return [RouteParamtypes.RESPONSE, RouteParamtypes.NEXT].some((each) => taken.includes(each)) && !Reflect.getMetadata(RESPONSE_PASSTHROUGH_METADATA, type, name);
}

class IdempotencyInterceptor {
	#idempotency;

	constructor(options) {
		this.#idempotency = idempotency(options);
	}

	async intercept(context, next) {
		if (sendsItself(context.getClass(), context.getHandler().name))
			throw new Error("the method would send its answer before the commit: return it, with @Res({ passthrough: true }) for its status and headers");
		const http = context.switchToHttp();
		const request = http.getRequest();
		const response = http.getResponse();
		const raw = request.raw ?? request;
		if (request.rawBody === undefined && (raw.headers["transfer-encoding"] || Number(raw.headers["content-length"] ?? 0) > 0))
			throw new Error("the body was not kept: NestFactory.create(AppModule, { rawBody: true }), and app.useBodyParser() for what is neither JSON nor a form");
		const answer = await this.#idempotency.run({ method: raw.method, path: raw.originalUrl ?? raw.url, header: (name) => raw.headers[name.toLowerCase()],
			type: raw.headers["content-type"], bytes: Buffer.from(request.rawBody ?? ""), raw: request },
		(found) => current.run(found, () => this.#handle(response, next)));
		return this.#reply(response, answer);
	}

	// handle calls the route's method, and returns its answer, with the status and headers that Nest has set.
	async #handle(response, next) {
		const headers = () => ({ ...response.getHeaders() });
		try {
			const body = await last(next.handle());
			return { status: response.statusCode, headers: headers(), body: body instanceof StreamableFile ? body.getStream() : body };
		} catch (error) {
			if (!(error instanceof HttpException))
				throw error;
			const body = error.getResponse();
			const statusCode = error.getStatus();
			return { status: statusCode, headers: headers(), body: typeof body === "string" ? { statusCode, message: body } : body };
		}
	}

	// reply has Nest send an answer, whose bytes it does not change in a StreamableFile.
	#reply(response, { status, headers, body }) {
		(response.code ?? response.status).call(response, status);
		for (const [name, value] of Object.entries(headers))
			(response.setHeader ?? response.header).call(response, name, value); // Express's header() would add a charset
		return [body.length === 0 ? undefined : new StreamableFile(body)];
	}
}

module.exports = { IdempotencyInterceptor, session, transaction };
