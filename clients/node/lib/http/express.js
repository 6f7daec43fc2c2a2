// A handler for Express: idempotent(options, handler), where handler(request, tx, session) returns
// {status, headers, body}. It needs no body parser.

"use strict";

const { fromNode, idempotency, keepBody, send } = require("./http.js");

function express(options, handler) {
	const { run, maxBody } = idempotency(options);
	return async (request, response, next) => {
		try {
			const { refused, ...asked } = await fromNode(request, { path: request.originalUrl, rawBody: request.rawBody, limit: maxBody,
				parsed: (body) => { request.body = body; } });
			send(response, refused ?? await run(asked, (session) => handler(request, session.tx, session)));
		} catch (error) {
			next(error);
		}
	};
}

module.exports = { express, idempotent: express, keepBody };
