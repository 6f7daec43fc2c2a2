// Options of a route of Fastify: app.post(path, idempotent(options, handler)), where handler(request, tx,
// session) returns {status, headers, body}. Fastify parses the body; bodies other than JSON and text need a
// parser, such as that of @fastify/formbody.

"use strict";

const { Readable } = require("stream");
const { fromNode, idempotency } = require("./http.js");

const answer = (reply, { status, headers, body }) => reply.code(status).headers(headers).send(body.length > 0 ? body : undefined);

function fastify(options, handler) {
	const { run, maxBody } = idempotency(options);
	const asked = Symbol("request");
	return {
		// preParsing keeps the bytes, and gives Fastify's parser a stream of them.
		async preParsing(request, reply, payload) {
			const stream = Object.assign(payload, { headers: request.raw.headers, method: request.raw.method });
			const found = await fromNode(stream, { path: request.raw.url, raw: request, limit: maxBody, parsed() {} });
			if (found.refused)
				return answer(reply, found.refused);
			request[asked] = found;
			return Object.assign(Readable.from([found.bytes], { objectMode: false }), { receivedEncodedLength: found.bytes.length });
		},
		async handler(request, reply) {
			return answer(reply, await run(request[asked], (session) => handler(request, session.tx, session)));
		},
	};
}

module.exports = { fastify, idempotent: fastify };
