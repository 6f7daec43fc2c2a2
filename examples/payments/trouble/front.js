// The front of the demo: it passes requests to two workers, which are instances of the
// service, in turn; makes the trouble that the buttons of the page ask for; and reports
// what happens. It adds the buttons to the page: the service itself has none of this.
//
// Run it beside the service: README.md lists the environment that it needs.

"use strict";

const { execFile } = require("child_process");
const { readFileSync } = require("fs");
const http = require("http");
const path = require("path");
const { setTimeout: sleep } = require("timers/promises");

const { Observer } = require("./observer");
const { Worker } = require("./worker");

const directory = process.env.PAYMENTS_DIR;
const times = { restart: 3000, stall: 8000, freeze: 15000 }; // ms; a lease is 10 s, a heartbeat 3 s
const workers = [new Worker("A"), new Worker("B")];
const armed = { lose: false, twice: false }; // for the next payment
const parts = { provider: "ready", database: "ready" };
const sent = { "/charges": { requests: 0, keys: new Set() }, "/orders": { requests: 0, keys: new Set() } };
const listeners = new Set(); // open streams of events
let turns = 0;

// ---------------------------------------------------------------------------
// Reports
// ---------------------------------------------------------------------------

// report sends an event to every open page.
function report(event) {
	for (const listener of listeners)
		listener.write(`data: ${JSON.stringify(event)}\n\n`);
}

const observer = new Observer(report);

// state is what the page shows apart from the timeline.
const state = () => ({
	kind: "state",
	armed,
	parts: { ...Object.fromEntries(workers.map(({ name, state }) => [name, state])), ...parts },
	sent: Object.fromEntries(Object.entries(sent).map(([where, { requests, keys }]) => [where, { requests, keys: keys.size }])),
	...observer.seen,
	provided: readFileSync(process.env.PAYMENTS_PROVIDER_STATE, "utf8").split("\n").length - 1,
});

// observe reports the state whenever it changes, while a page is open.
async function observe() {
	for (let last = ""; ; await sleep(150)) {
		if (listeners.size === 0)
			continue;
		await observer.look();
		const next = state();
		if (JSON.stringify(next) !== last) {
			report(next);
			last = JSON.stringify(next);
		}
	}
}

// ---------------------------------------------------------------------------
// Trouble
// ---------------------------------------------------------------------------

// victim returns the worker that has a payment in progress, or gets the next one.
const victim = () => workers.find((worker) => worker.busy > 0) ?? workers[turns % workers.length];

const begins = (name, text) => report({ kind: "begins", name, text });
const ends = (name, text) => report({ kind: "ends", name, text });

// signal sends a signal to the provider.
const signal = (name) => process.kill(Number(readFileSync(path.join(directory, "provider.pid"), "utf8")), name);

const troubles = {
	lose() {
		armed.lose = !armed.lose;
	},

	twice() {
		armed.twice = !armed.twice;
	},

	async kill() {
		const worker = victim();
		if (worker.state !== "ready")
			return;
		worker.kill();
		begins("kill", `Worker ${worker.name} is killed.`);
		await sleep(times.restart);
		await worker.start();
		ends("kill", `Worker ${worker.name} is started again.`);
	},

	async freeze() {
		const worker = victim();
		if (worker.state !== "ready")
			return;
		worker.freeze();
		begins("freeze", `Worker ${worker.name} is frozen for ${times.freeze / 1000}\u00a0s.`);
		await sleep(times.freeze);
		ends("freeze", `Worker ${worker.name} continues.`);
		worker.thaw();
	},

	async stall() {
		if (parts.provider !== "ready")
			return;
		parts.provider = "stalled";
		signal("SIGSTOP");
		begins("stall", `The provider is stalled for ${times.stall / 1000}\u00a0s.`);
		await sleep(times.stall);
		signal("SIGCONT");
		parts.provider = "ready";
		ends("stall", "The provider continues.");
	},

	async restart() {
		if (parts.database !== "ready")
			return;
		parts.database = "restarting";
		begins("restart", "The database crashes.");
		await new Promise((done) => execFile(path.join(directory, "restart-database"), done));
		parts.database = "ready";
		ends("restart", "The database has recovered.");
	},
};

// ---------------------------------------------------------------------------
// Requests
// ---------------------------------------------------------------------------

// take returns whether a trouble was armed, and disarms it.
function take(name) {
	const was = armed[name];
	armed[name] = false;
	return was;
}

// pay passes a payment to the worker whose turn it is. Returns the answer; undefined
// if it is lost.
async function pay(request, body) {
	const key = /^"(.*)"$/.exec(request.headers["idempotency-key"])?.[1];
	const [lost, twice] = [take("lose"), take("twice")];
	const turn = async () => {
		const worker = workers[turns++ % workers.length];
		sent[request.url].requests++;
		sent[request.url].keys.add(key);
		const answer = await worker.exchange(request, body);
		return { worker: worker.name, answer, result: { status: answer?.status, replayed: answer?.headers["idempotent-replayed"] } };
	};
	const [first, second] = [turn(), twice ? turn() : null];
	second?.then(({ worker, result }) => report({ kind: "second", key, worker, ...result }));
	const { worker, answer, result } = await first;
	if (lost && answer)
		report({ kind: "lost", key, worker, ...result });
	return lost ? undefined : answer;
}

// read passes any other request to a worker that is ready.
const read = async (request, body) => workers.find((worker) => worker.state === "ready")?.exchange(request, body);

// withPanel adds the panel to the page.
function withPanel({ status, headers, body }) {
	const changed = Buffer.from(body.toString().replace("</main>", () => `${panel}\n\t</main>`));
	return { status, headers: { ...headers, "content-length": changed.length }, body: changed };
}

const panel = readFileSync(path.join(__dirname, "panel.html"), "utf8");
const files = { "/trouble/panel.js": "text/javascript", "/trouble/panel.css": "text/css" };

// answer returns the answer to a request.
async function answer(request) {
	const chunks = [];
	for await (const chunk of request)
		chunks.push(chunk);
	const body = Buffer.concat(chunks);
	const [, trouble] = /^\/trouble\/(\w+)$/.exec(request.url) ?? [];
	if (request.method === "POST" && Object.hasOwn(sent, request.url))
		return pay(request, body);
	if (request.method === "POST" && Object.hasOwn(troubles, trouble)) {
		troubles[trouble]();
		return { status: 204, headers: {}, body: "" };
	}
	if (Object.hasOwn(files, request.url))
		return { status: 200, headers: { "Content-Type": `${files[request.url]}; charset=utf-8` },
			body: readFileSync(path.join(__dirname, path.basename(request.url))) };
	const given = await read(request, body);
	return given && request.url === "/" ? withPanel(given) : given;
}

// listen opens a stream of events to the page.
function listen(request, response) {
	response.writeHead(200, { "Content-Type": "text/event-stream", "Cache-Control": "no-store" });
	listeners.add(response);
	response.once("close", () => listeners.delete(response));
	response.write(`data: ${JSON.stringify(state())}\n\n`);
}

const server = http.createServer(async (request, response) => {
	if (request.url === "/trouble/events")
		return listen(request, response);
	const given = await answer(request).catch(() => undefined);
	if (!given)
		return response.socket?.resetAndDestroy();
	// Chromium itself repeats a request that is reset on a reused connection, and would
	// hide the attempt that is lost.
	response.writeHead(given.status, { ...given.headers, connection: "close" });
	response.end(request.method === "HEAD" ? undefined : given.body);
});

// A stopped process would not end before run kills it.
for (const name of ["SIGTERM", "SIGINT"])
	process.once(name, () => {
		for (const worker of workers)
			worker.kill();
		if (parts.provider === "stalled")
			signal("SIGCONT");
		process.exit();
	});

Promise.all(workers.map((worker) => worker.start())).then(() => {
	server.listen(Number(process.env.PORT || 0), "127.0.0.1", () => {
		console.log(`listening on http://127.0.0.1:${server.address().port}`);
	});
	observe();
});
