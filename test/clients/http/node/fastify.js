"use strict";

const { fastify } = require("fastify");
const { idempotent } = require("../../../../clients/node/lib/http/fastify.js");

module.exports = async function serve({ call, paths, routes }) {
	const app = fastify();
	app.addContentTypeParser("*", { parseAs: "buffer" }, (request, body, done) => done(null, body));
	for (const [path, options, handler] of routes((request) => request.headers["x-user"]))
		app.post(path, idempotent(options, ({ body, query }, tx, session) => handler({ body, query }, tx, session)));
	for (const path of paths)
		app.post(path, async (request, reply) => {
			const { status, body } = await call(path, request.body);
			return reply.code(status).send(body);
		});
	await app.listen({ port: 0, host: "127.0.0.1" });
	console.log(app.server.address().port);
};
