// Options of a route of Fastify: app.post(path, idempotent(options, handler)), where handler(request, tx,
// session) returns {status, headers, body}. Fastify parses the body; bodies other than JSON and text need a
// parser, such as that of @fastify/formbody.

"use strict";

const { Readable } = require("stream");
const { fromNode, idempotency } = require("./http.js");

function fastify(options, handler) {
	const { run, maxBody } = idempotency(options);
	const asked = Symbol("request");
	return {
		// preParsing keeps the bytes, and gives Fastify's parser a stream of them.
		async preParsing(request, reply, payload) {
			const stream = Object.assign(payload, { headers: request.raw.headers, method: request.raw.method });
			request[asked] = await fromNode(stream, { path: request.raw.url, raw: request, limit: maxBody, parsed: () => {} });
			return Object.assign(Readable.from([request[asked].bytes ?? Buffer.alloc(0)], { objectMode: false }), { receivedEncodedLength: request[asked].bytes?.length ?? 0 });
		},
		async handler(request, reply) {
			const { refused, ...rest } = request[asked] ?? {};
			const answer = refused ?? await run({ bytes: Buffer.alloc(0), method: request.raw.method, path: request.raw.url, raw: request,
				header: (name) => request.headers[name.toLowerCase()], ...rest }, (session) => handler(request, session.tx, session));
			return reply.code(answer.status).headers(answer.headers).send(answer.body.length > 0 ? answer.body : undefined);
		},
	};
}

module.exports = { fastify, idempotent: fastify };
