// The panel: the timeline of each payment, the state of the demo, and its buttons.
//
// pay.js sends the event "attempt" for each request; the front sends its events as a
// stream. This script runs before pay.js, so that it misses no attempt.

"use strict";

const timeline = document.getElementById("timeline");
const payments = new Map(); // the elements of the timeline, by key
const waiting = new Map(); // troubles without a payment in progress, by name
const longest = 6; // number of payments on the timeline
const second = 1000;

const seconds = (milliseconds) => `${(milliseconds / second).toFixed(1)}\u00a0s`;

// make returns a new element.
function make(tag, { text = "", ...attributes } = {}, ...children) {
	const made = document.createElement(tag);
	made.append(text, ...children);
	for (const [name, value] of Object.entries(attributes))
		made.setAttribute(name, value);
	return made;
}

// ---------------------------------------------------------------------------
// The timeline
// ---------------------------------------------------------------------------

// outcomeOf returns the outcome of a request, and what it means.
function outcomeOf({ status, replayed, late }) {
	if (status === undefined)
		return ["lost", late ? `No answer came within ${seconds(late)}.` : "The connection was reset."];
	if (status < 500 && replayed)
		return ["replayed", "The stored answer is returned."];
	if (status === 201)
		return ["charged", "The answer is stored with the row."];
	if (status === 409)
		return ["in progress", "Another request holds the key."];
	return status < 500 ? ["refused", "This answer is final."] : ["unavailable", `The service answered ${status}.`];
}

// begin adds a payment to the timeline, the newest first.
function begin({ key, path, body }) {
	const { amount, currency } = JSON.parse(body);
	const title = `${path === "/orders" ? "Order" : "Charge"} of ${(amount / 100).toFixed(2)} ${currency}`;
	const events = make("ol");
	const payment = make("article", {}, make("h3", { text: title }), make("p", { class: "key" }, "Key ", make("code", { text: key })), events);
	timeline.prepend(payment);
	document.getElementById("none").hidden = true;
	payments.set(key, { payment, events, began: Date.now(), attempts: 0, over: false });
	for (const text of waiting.values())
		add(key, "trouble", text);
	waiting.clear();
	if (payments.size > longest) {
		const [oldest] = payments.keys();
		payments.get(oldest).payment.remove();
		payments.delete(oldest);
	}
}

const newest = () => [...payments.values()].at(-1);

// add adds an event to a payment, or to the newest one. Returns the function that
// changes it.
function add(key, kind, what, outcome = "", text = "") {
	const of = payments.get(key) ?? newest();
	if (!of)
		return () => {};
	const item = make("li", { class: kind });
	const change = (what, outcome, text) => item.replaceChildren(
		make("time", { text: seconds(began - of.began) }),
		make("p", {}, make("b", { text: what }), " ",
			...outcome ? [make("mark", { text: outcome, "data-outcome": outcome }), " "] : [], make("span", { text })));
	const began = Date.now();
	change(what, outcome, text);
	of.events.append(item);
	return change;
}

addEventListener("attempt", async ({ detail }) => {
	if (!payments.has(detail.key))
		begin(detail);
	const payment = payments.get(detail.key);
	const what = `Attempt ${++payment.attempts}`;
	const change = add(detail.key, "attempt", what, "sent");
	const [outcome, text] = outcomeOf(await detail.answered);
	change(what, outcome, text);
	payment.over = ["charged", "replayed", "refused"].includes(outcome);
});

// The changes of a lease.
const changes = {
	granted: ({ token }) => `Token ${token} holds a lease of 10\u00a0s.`,
	"taken over": ({ token }) => `Token ${token} is the next owner.`,
	renewed: ({ token }) => `A heartbeat renews token ${token}.`,
	charged: () => "The charge of the provider is stored.",
	released: ({ token }) => `Token ${token} releases the lease.`,
	expired: ({ token }) => `The owner with token ${token} is silent.`,
	finished: ({ token }) => `Token ${token} stores the order and its answer.`,
};

const events = {
	state: (event) => showState(event),
	begins: ({ name, text }) => newest()?.over === false ? add(null, "trouble", text) : waiting.set(name, text),
	ends: ({ name, text }) => waiting.delete(name) || add(null, "trouble", text),
	lost: ({ key, worker, ...result }) => add(key, "service", `Worker ${worker}`, outcomeOf(result)[0], "The answer is lost."),
	second: ({ key, worker, ...result }) => add(key, "service", `Second request, worker ${worker}`, ...outcomeOf(result)),
	lease: ({ key, change, ...lease }) => add(key, "lease", "Lease", change, changes[change](lease)),
	fenced: () => add(null, "lease", "Lease", "fenced", "A former owner is rejected: its token is stale."),
};

new EventSource("/trouble/events").addEventListener("message", ({ data }) => {
	const event = JSON.parse(data);
	events[event.kind](event);
});

// ---------------------------------------------------------------------------
// The state
// ---------------------------------------------------------------------------

let leases = [];

function showState({ sent, rows, provided, parts, armed, ...state }) {
	for (const [path, { requests, keys }] of Object.entries(sent)) {
		const cells = document.getElementById(path.slice(1)).querySelectorAll("td");
		[requests, keys, rows[path], ...path === "/orders" ? [provided] : []].forEach((number, i) => { cells[i].textContent = number; });
	}
	for (const [name, state] of Object.entries(parts)) { // a change only, because the list is live
		const part = document.getElementById(name);
		if (part.dataset.state !== state) {
			part.dataset.state = state;
			part.textContent = `${part.dataset.name}: ${state}`;
		}
	}
	for (const [name, pressed] of Object.entries(armed))
		document.getElementById(name).setAttribute("aria-pressed", pressed);
	leases = state.leases;
	showLeases();
}

// showLeases shows the orders in progress, and how long their leases last.
function showLeases() {
	document.getElementById("leases").replaceChildren(...leases.map(({ key, token, attempt, end }) => {
		const left = Math.max(0, end - Date.now());
		return make("p", {}, make("span", { text: `Order ${key.slice(-6)}, owner ${attempt}, token ${token}: lease ` +
			(left > 0 ? `of ${Math.ceil(left / second)}\u00a0s` : "expired") }),
			make("meter", { min: 0, max: 10 * second, value: left, "aria-label": `Lease of token ${token}` }));
	}));
}

setInterval(showLeases, 250);

for (const button of document.querySelectorAll("#trouble button"))
	button.addEventListener("click", () => fetch(`/trouble/${button.id}`, { method: "POST" }));
