// A handler for Hono: idempotent(options, handler), where handler(c, tx, session) returns c.json(…)
// or another Response with the whole body.

"use strict";

const { idempotency } = require("./http.js");

function hono(options, handler) {
	const { run, maxBody } = idempotency(options);
	return async (c) => {
		const bytes = Buffer.from(await c.req.arrayBuffer());
		if (bytes.length > maxBody)
			return c.json({ type: "about:blank", title: "Payload Too Large", status: 413, detail: `The body exceeds ${maxBody} bytes.` }, 413,
				{ "Content-Type": "application/problem+json" });
		const { pathname, search } = new URL(c.req.url);
		const { status, headers, body } = await run({ method: c.req.method, path: pathname + search, header: (name) => c.req.header(name),
			type: c.req.header("Content-Type"), bytes, raw: c }, (session) => handler(c, session.tx, session));
		const fields = new Headers();
		for (const [name, values] of Object.entries(headers))
			for (const value of [values].flat())
				fields.append(name, value);
		return new Response(body.length > 0 && ![204, 205, 304].includes(status) ? body : null, { status, headers: fields });
	};
}

module.exports = { hono, idempotent: hono };
