// The Pay button.
//
// One intent, one key: the page makes the key when the user confirms, and stores it
// with the request before sending. After a lost answer, a reload, or while the server
// is down, the page sends the same request with the same key until an answer is final.
// Only a new payment makes a new key.

"use strict";

const element = (id) => document.getElementById(id);
const { token, retention } = document.documentElement.dataset;
const pauses = { first: 250, longest: 8000, answer: 15000 }; // ms
const final = [201, 400, 402, 413, 415, 422]; // a retry would get the same; other answers are retried

// The intent: { key, path, body, begun, answer }, or null. The answer exists once it is
// final.
const intent = {
	load: () => JSON.parse(localStorage.getItem("payment")),
	store: (value) => localStorage.setItem("payment", JSON.stringify(value)),
	clear: () => localStorage.removeItem("payment"),
};
let sending = false;

// isCurrent returns whether an intent is the stored one: another tab can have finished
// it, and begun the next.
const isCurrent = ({ key }) => intent.load()?.key === key;

// isExpired returns whether the key can have expired when a request arrives. Sending
// the request then would charge again.
const isExpired = ({ begun }) => Date.now() - begun > 1000 * retention - pauses.answer;

// show sets the page to a state.
function show(state, text, charge = "") {
	const busy = state === "sending" || state === "retrying";
	const over = state === "paid" || state === "refused";
	element("status").dataset.state = state;
	element("status").textContent = text;
	element("kind").textContent = element("form").elements.path.value === "/orders" ? "Order" : "Charge";
	element("charge").textContent = charge;
	element("result").hidden = charge === "";
	for (const field of element("form").elements)
		field.disabled = busy || over;
	element("pay").hidden = over;
	element("again").hidden = !over;
	if (over && document.activeElement === document.body) // the button that had the focus is gone
		element("again").focus();
}

// fill restores the fields of the current payment, which a reload clears, or resets
// them.
function fill(value) {
	element("form").reset();
	if (value === null)
		return;
	const { amount, description, item } = JSON.parse(value.body);
	element("form").elements.path.value = value.path;
	element("amount").value = (amount / 100).toFixed(2);
	element("card").value = description ?? item;
}

// showAnswer shows a final answer.
function showAnswer({ status, body }) {
	if (status === 201)
		show("paid", `Paid: ${(body.amount / 100).toFixed(2)} ${body.currency}.`, String(body.id));
	else
		show("refused", body.detail || body.title || `Refused (${status}).`);
}

// request sends the request once. Returns the answer, without a status if it is lost,
// incomplete or late.
async function request({ key, path, body }) {
	try {
		const response = await fetch(path, {
			method: "POST",
			headers: {
				"Authorization": `Bearer ${token}`,
				"Content-Type": "application/json",
				"Idempotency-Key": `"${key}"`,
			},
			body,
			signal: AbortSignal.timeout(pauses.answer),
		});
		return {
			status: response.status,
			replayed: response.headers.has("Idempotent-Replayed"),
			wait: 1000 * (Number(response.headers.get("Retry-After")) || 0),
			body: await response.json(),
		};
	} catch ({ name }) {
		return { wait: 0, late: name === "TimeoutError" ? pauses.answer : 0 };
	}
}

// send sends the intent until there is a final answer, or the key has expired.
async function send(value) {
	if (sending)
		return;
	sending = true;
	show("sending", "Paying\u2026");
	for (let pause = pauses.first; isCurrent(value) && !isExpired(value); pause = Math.min(2 * pause, pauses.longest)) {
		const answered = request(value);
		dispatchEvent(new CustomEvent("attempt", { detail: { ...value, answered } })); // for other scripts
		const { status, body, wait } = await answered;
		if (final.includes(status)) {
			if (isCurrent(value))
				intent.store({ ...value, answer: { status, body } });
			break;
		}
		show("retrying", "No answer yet; trying again. You will be charged once.");
		await new Promise((resolve) => setTimeout(resolve, Math.max(wait, pause * (0.5 + Math.random()))));
	}
	sending = false;
	resume();
}

// newKey makes a UUID of version 7, which begins with the time: adjacent keys suit the
// server's index. crypto.randomUUID() makes version 4, and is missing on pages over
// plain HTTP.
function newKey() {
	const bytes = crypto.getRandomValues(new Uint8Array(10));
	bytes[0] = 0x70 | bytes[0] & 0x0f;
	bytes[2] = 0x80 | bytes[2] & 0x3f;
	const hex = (number, digits) => number.toString(16).padStart(digits, "0");
	return (hex(Date.now(), 12) + Array.from(bytes, (byte) => hex(byte, 2)).join(""))
		.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

// resume continues with the stored intent: after a reload, an answer, or a change by
// another tab.
function resume() {
	const value = intent.load();
	fill(value);
	if (value === null)
		show("ready", "");
	else if (value.answer)
		showAnswer(value.answer);
	else if (isExpired(value))
		show("refused", "The key of this payment has expired. Check your charges before you pay again.");
	else
		send(value);
}

element("form").addEventListener("submit", (event) => {
	event.preventDefault();
	if (intent.load() !== null) {
		resume();
		return;
	}
	const amount = element("amount").value.trim();
	if (!/^\d{1,9}([.,]\d{1,2})?$/.test(amount) || Number(amount.replace(",", ".")) === 0) {
		show("ready", "Please enter an amount, such as 25.00.");
		element("amount").focus();
		return;
	}
	const path = element("form").elements.path.value;
	const value = {
		key: newKey(),
		path,
		body: JSON.stringify({
			amount: Math.round(100 * Number(amount.replace(",", "."))),
			currency: "EUR",
			[path === "/orders" ? "item" : "description"]:
				`Card ending in ${element("card").value.replace(/\D/g, "").slice(-4) || "none"}`,
		}),
		begun: Date.now(),
	};
	intent.store(value);
	send(value);
});

element("again").addEventListener("click", () => {
	intent.clear();
	resume();
	element("amount").focus();
});

// Another tab has begun, finished or cleared a payment.
addEventListener("storage", () => {
	if (!sending)
		resume();
});

resume();
