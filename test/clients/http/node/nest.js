// NestJS, with the decorators called as functions. A route's method gets its transaction by transaction().

"use strict";

require("reflect-metadata");
const { Controller, HttpCode, HttpException, Module, Post, Req, Res, StreamableFile, UseInterceptors } = require("@nestjs/common");
const { NestFactory } = require("@nestjs/core");
const { IdempotencyInterceptor, session, transaction } = require("../../../../clients/node/lib/http/nest.js");

// decorate applies decorators to a method of a class, and to its parameters.
function decorate(type, name, decorators, parameters) {
	for (const [index, parameter] of parameters.entries())
		parameter(type.prototype, name, index);
	for (const each of decorators)
		each(type.prototype, name, Object.getOwnPropertyDescriptor(type.prototype, name));
}

module.exports = async function serve({ call, paths, routes }) {
	class Charges {}
	for (const [path, options, handler] of routes((request) => request.get("X-User"))) {
		Charges.prototype[path] = async function (request, response) {
			const { status = 200, headers = {}, body } = await handler({ body: request.body, query: request.query }, transaction(), session());
			response.status(status).set(headers);
			if (status >= 400)
				throw new HttpException(body, status);
			return path === "/stream" ? new StreamableFile(body) : body;
		};
		decorate(Charges, path, [Post(path), HttpCode(200), UseInterceptors(new IdempotencyInterceptor(options))], [Req(), Res({ passthrough: true })]);
	}
	for (const path of paths) {
		Charges.prototype[path] = async function (request, response) {
			const { status, body } = await call(path, request.body);
			response.status(status);
			return body;
		};
		decorate(Charges, path, [Post(path), HttpCode(200)], [Req(), Res({ passthrough: true })]);
	}
	Controller()(Charges);
	class App {}
	Module({ controllers: [Charges] })(App);
	const app = await NestFactory.create(App, { rawBody: true, logger: false });
	app.useBodyParser("raw", { type: (request) => !/json|urlencoded/.test(request.headers["content-type"] ?? "json") });
	await app.listen(0, "127.0.0.1");
	console.log(app.getHttpServer().address().port);
};
