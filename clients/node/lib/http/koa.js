// A middleware for Koa: idempotent(options, handler), where handler(ctx, tx, session) returns
// {status, headers, body}. It needs no body parser.

"use strict";

const { fromNode, idempotency, send } = require("./http.js");

function koa(options, handler) {
	const { run, maxBody } = idempotency(options);
	return async (ctx) => {
		const { refused, ...asked } = await fromNode(ctx.req, { path: ctx.originalUrl, rawBody: ctx.request.rawBody, raw: ctx, limit: maxBody,
			parsed: (body) => { ctx.request.body = body; } });
		const answer = refused ?? await run(asked, (session) => handler(ctx, session.tx, session));
		ctx.respond = false; // Koa would add a Content-Type to an answer without one
		send(ctx.res, answer);
	};
}

module.exports = { idempotent: koa, koa };
