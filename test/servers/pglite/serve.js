// node serve.js DIRECTORY: serves a new PGlite on the socket DIRECTORY/.s.PGSQL.5432, so that psql, and with it
// pg_regress, can use it as a server. It prints a line when it is ready, and ends with its standard input.
//
// PGlite has one session: connections take it one after another, as the role that they name, and each gets it
// without settings, roles and temporary objects of the one before. A start of a session is answered here; all other
// messages are those of PGlite.

"use strict";

const net = require("net");
const { PGlite } = require("@electric-sql/pglite");

const SSL = 80877103;
const GSS = 80877104;

// message returns a message of the server: its type, and strings or numbers of four bytes.
function message(type, ...parts) {
	const body = Buffer.concat(
		parts.map((part) => {
			if (typeof part === "string")
				return Buffer.from(part + "\0");
			const number = Buffer.alloc(4);
			number.writeInt32BE(part);
			return number;
		}),
	);
	const head = Buffer.alloc(5);
	head.write(type);
	head.writeInt32BE(body.length + 4, 1);
	return Buffer.concat([head, body]);
}

const READY = Buffer.from([0x5a, 0, 0, 0, 5, 0x49]);

// greeting returns the answer to a start, and gives the session to the role.
async function greeting(db, packet) {
	const values = packet.subarray(8).toString().split("\0");
	const start = {};
	for (let i = 0; i + 1 < values.length && values[i]; i += 2)
		start[values[i]] = values[i + 1];
	await db.exec("ROLLBACK").catch(() => {});
	await db.exec("SET SESSION AUTHORIZATION postgres"); // RESET would have no effect
	await db.exec("DISCARD ALL");
	for (const name of ["TimeZone", "datestyle", "application_name"])
		if (start[name])
			await db.query("SELECT set_config($1, $2, false)", [name, start[name]]);
	for (const [, name, value] of (start.options || "").matchAll(/-c\s*([^=\s]+)=(\S*)/g))
		await db.query("SELECT set_config($1, $2, false)", [name, value]);
	if (start.user)
		await db.exec(`SET SESSION AUTHORIZATION "${start.user.replaceAll('"', '""')}"`);
	const settings = (await db.query("SELECT name, setting FROM pg_settings WHERE name IN ('server_version', 'server_encoding', 'client_encoding', 'standard_conforming_strings', 'DateStyle', 'TimeZone', 'integer_datetimes', 'is_superuser')")).rows;
	return Buffer.concat([message("R", 0), ...settings.map(({ name, setting }) => message("S", name, setting)), message("K", 1, 1), READY]);
}

// serve answers the messages of one connection until it ends.
async function serve(db, socket) {
	let buffer = Buffer.alloc(0);
	let started = false;
	for await (const chunk of socket) {
		buffer = Buffer.concat([buffer, chunk]);
		for (;;) {
			const type = started ? 1 : 0;
			const length = buffer.length >= type + 4 ? buffer.readInt32BE(type) + type : Infinity;
			if (buffer.length < length)
				break;
			const packet = buffer.subarray(0, length);
			buffer = buffer.subarray(length);
			if (started && packet[0] === 0x58) // Terminate
				return;
			if (!started && [SSL, GSS].includes(packet.readInt32BE(4))) {
				socket.write("N");
			} else if (!started) {
				socket.write(await greeting(db, packet));
				started = true;
			} else {
				socket.write(await db.execProtocolRaw(new Uint8Array(packet)));
			}
		}
	}
}

async function main(directory) {
	const db = await PGlite.create();
	let last = Promise.resolve();
	const server = net.createServer((socket) => {
		last = last.then(() => serve(db, socket)).then(() => socket.destroy());
	});
	server.listen(`${directory}/.s.PGSQL.5432`, () => console.log("ready"));
	process.stdin.resume().on("end", () => process.exit(0));
}

// PGlite does not survive its errors: fail, instead of a test that waits.
process.on("unhandledRejection", (error) => {
	console.error(error.message);
	process.exit(1);
});
main(process.argv[2]);
