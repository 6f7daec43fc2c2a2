// The frame of the Node clients: reads requests as lines of JSON, calls the driver, and
// answers each with a line. A driver's program passes the function that makes a session
// from host and whether to prepare statements: an object with query() and the functions begin, commit, rollback, savepoint and undo.

"use strict";

const readline = require("readline");

// native returns an argument in the type in which an application has it. JavaScript has
// no UUID and no duration: both are strings.
function native(kind, value, wrap) {
	switch (kind) {
	case "wrapped":
		return wrap(value);
	case "interval":
		return `${value} seconds`;
	case "bytes":
		return Buffer.from(value, "hex");
	default:
		return value;
	}
}

const names = { "rollback to savepoint": "undo" };

// answer does what a request says, and returns the rows.
async function answer(session, request, wrap) {
	if (!request.do.startsWith("query")) {
		await session[names[request.do] ?? request.do]();
		return [];
	}
	const rows = await session.query(request.sql, request.arguments.map(([kind, value]) => native(kind, value, wrap)));
	return request.do === "query json" ? rows.map(([text]) => JSON.parse(text)) : rows;
}

// serve answers requests until the end of the input. A session is made at its first
// request.
async function serve(makeSession, wrap) {
	const sessions = {};
	for await (const line of readline.createInterface({ input: process.stdin })) {
		const request = JSON.parse(line);
		let reply;
		try {
			const key = [request.session, request.host, request.prepared];
			sessions[key] ??= await makeSession(request.host, request.prepared);
			reply = { rows: await answer(sessions[key], request, wrap) };
		} catch (error) {
			reply = { error: error.code ?? "", message: String(error) };
		}
		console.log(JSON.stringify(reply));
	}
	process.exit();
}

module.exports = { serve };
