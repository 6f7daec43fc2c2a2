"use strict";

const { serve } = require("@hono/node-server");
const { Hono } = require("hono");
const { streamText } = require("hono/streaming");
const { idempotent } = require("../../../../clients/node/lib/http/hono.js");

module.exports = function start({ call, paths, routes }) {
	const app = new Hono();
	for (const [path, options, handler] of routes((c) => c.req.header("X-User")))
		app.post(path, idempotent(options, async (c, tx, session) => {
			const body = c.req.header("Content-Type")?.includes("json") ? await c.req.json() : undefined;
			const { status = 200, headers = {}, body: answer } = await handler({ body, query: c.req.query() }, tx, session);
			if (path === "/stream")
				return streamText(c, (stream) => stream.write("a"));
			return answer instanceof Uint8Array || answer === undefined ? c.body(answer ?? null, status, headers) : c.json(answer, status, headers);
		}));
	for (const path of paths)
		app.post(path, async (c) => {
			const { status, body } = await call(path, await c.req.json());
			return c.json(body, status);
		});
	app.onError((error, c) => c.json({ error: String(error) }, 500));
	serve({ fetch: app.fetch, port: 0, hostname: "127.0.0.1" }, ({ port }) => console.log(port));
};
