"use strict";

const Koa = require("koa");
const { idempotent } = require("../../../../clients/node/lib/http/koa.js");

module.exports = function serve({ call, paths, routes }) {
	const app = new Koa();
	app.silent = true; // an error is answered without a log
	const found = new Map(routes((ctx) => ctx.get("X-User") || undefined).map(([path, options, handler]) =>
		[path, idempotent(options, (ctx, tx, session) => handler({ body: ctx.request.body, query: ctx.query }, tx, session))]));
	app.use(async (ctx) => {
		if (!paths.includes(ctx.path))
			return found.get(ctx.path)(ctx);
		const chunks = [];
		for await (const chunk of ctx.req)
			chunks.push(chunk);
		Object.assign(ctx, await call(ctx.path, JSON.parse(Buffer.concat(chunks))));
	});
	const server = app.listen(0, "127.0.0.1", () => console.log(server.address().port));
};
