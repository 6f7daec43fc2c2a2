"use strict";

const express = require("express");
const { idempotent } = require("../../../../clients/node/lib/http/express.js");

module.exports = function serve({ call, paths, routes }) {
	const app = express();
	app.set("env", "test"); // an error is answered without a log
	for (const [path, options, handler] of routes((request) => request.get("X-User")))
		app.post(path, idempotent(options, ({ body, query }, tx, session) => handler({ body, query }, tx, session)));
	app.use(express.json());
	for (const path of paths)
		app.post(path, async (request, response) => {
			const { status, body } = await call(path, request.body);
			response.status(status).json(body);
		});
	const server = app.listen(0, "127.0.0.1", () => console.log(server.address().port));
};
