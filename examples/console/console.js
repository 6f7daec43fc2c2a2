// The page. It shows every text as text, never as HTML: keys and errors are hostile input.

const element = (id) => document.getElementById(id);
const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? sessionStorage.getItem("token");
sessionStorage.setItem("token", token);
history.replaceState(null, "", "/");
const [pause, span] = [2000, 180000]; // ms between two samples, and that a chart shows
const samples = []; // { at, totals: for each chart, the total of each series }
let now, shown, wanted = {}, pointed = null; // the state of the database, and when it is shown; the keys to show; the share of a chart left of the pointer
// The charts: title, unit, panel, columns, and the column that names a series. Counters, whose unit is /s, show their growth.
const charts = [
	["Claims and replays", "/s", "stats", "claims replays completions failures releases"], ["Conflicts and refusals", "/s", "stats", "in_progress mismatches stale_tokens refused_commits"],
	["Waits for the owner of a key", "/s", "stats", "waits seconds_waited"], ["Open claims", "", "claims", "open waiting"],
	["Oldest transaction with a key", "\u00a0s", "claims", "oldest"], ["Leases", "/s", "stats", "takeovers zombies_reaped"],
	["Lag", "\u00a0s", "subscriptions", "lag", "subscription"], ["Acknowledged events", "/s", "partitions", "acknowledged", "subscription"],
	["Failed deliveries", "/s", "partitions", "failed", "subscription"], ["Failing for", "\u00a0s", "subscriptions", "failing_for", "subscription"],
	["Events", "/s", "stats", "published delivered events_dropped batches_expired"], ["Parked events", "", "subscriptions", "retried blocked dead"],
	["Size of tables", "\u00a0MB", "tables", "size", "name"], ["Dead rows", "", "tables", "dead", "name"],
	["Deleted by the reaper", "/s", "reaper", "keys events"], ["Processes", "", "processes", "running", "kind"],
];
const tables = { subscriptions: "Subscriptions", dead_letters: "Dead letters", partitions: "Partitions", holders: "Holders of keys", keys: "Keys" };
const buttons = { // of a row: action, arguments, and effect
	subscriptions: ({ subscription: s, state, retried, dead }) => [
		state === "paused" ? ["resume", [s], "Its events are delivered again."] : ["pause", [s], "Its events stay in the outbox until it is resumed."],
		...dead + retried ? [["redrive", [s], `All its dead letters, now ${dead}, are delivered again, with those that come meanwhile, after later events; what is retried later, now ${retried}, is due.`]] : [],
		...dead ? [["discard", [s], `All its dead letters, now ${dead}, are deleted, with those that come meanwhile.`]] : []],
	dead_letters: ({ subscription: s, event_id: e }) => [["redrive", [s, e], "The event is delivered again, after later events."], ["discard", [s, e], "The event is deleted."]],
	keys: ({ scope, key }) => [["forget", [scope, key], "The next request with this key runs again, and the owner of a lease loses it."]],
};
// Characters that are invisible, or change the order of others, are shown by their number.
const visible = (text) => String(text ?? "").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (character) => `\\u{${character.codePointAt(0).toString(16)}}`);
const words = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");
const number = (value, unit) => value === undefined ? "" : value.toLocaleString("en", { maximumSignificantDigits: 3 }) + unit;
const units = { lag: "\u00a0s", failing_for: "\u00a0s" };
const write = (node, text) => node.textContent === text || (node.textContent = text);

// make returns a new element.
function make(tag, attributes = {}, ...children) {
	const made = /^(svg|path)$/.test(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
	Object.entries(attributes).forEach(([name, value]) => typeof value === "function" ? made.addEventListener(name, value) : made.setAttribute(name, value));
	made.append(...children);
	return made;
}

// ask sends a request, and returns the answer; it throws the error that the server reports.
async function ask(where, body) {
	const response = await fetch(where, { method: body ? "POST" : "GET", body, headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" } });
	const answer = await response.json();
	return response.ok ? answer : Promise.reject(new Error(answer.error));
}

// totals sums the rows of a panel for each series of a chart.
function totals([, , panel, columns, by]) {
	const sums = new Map();
	for (const row of now.panels[panel]?.rows ?? [])
		columns.split(" ").forEach((column) => sums.set(by ? row[by] : column, (sums.get(by ? row[by] : column) ?? 0) + row[column]));
	return sums;
}

// draw draws a chart, with its values at the pointer or the newest ones.
function draw([title, unit, panel], i) {
	const point = ({ offsetX, currentTarget }) => { pointed = Math.min(1, offsetX / currentTarget.clientWidth); charts.forEach(draw); };
	const card = element(`chart-${i}`) ?? element("charts").appendChild(make("article", { id: `chart-${i}` }, make("h3", {}, title), make("output"),
		make("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": true, pointermove: point, pointerleave: () => { pointed = null; } }), make("ul")));
	const [, top, svg, list] = card.children;
	const x = samples.map(({ at }) => 100 * (at - samples[0].at) / (samples.at(-1).at - samples[0].at || 1)), at = pointed === null ? x.length - 1 : x.findIndex((each) => each >= 100 * pointed);
	const names = [...new Set(samples.flatMap((each) => [...each.totals[i].keys()]))].slice(0, 8);
	const lines = names.map((name) => samples.map(({ at, totals }, j) => {
		const [after, before] = [totals[i].get(name), samples[j - 1]?.totals[i].get(name)];
		return unit !== "/s" ? after : after >= before ? 1000 * (after - before) / (at - samples[j - 1].at) : undefined; // less: a restart
	}));
	const most = Math.max(1, ...lines.flat().filter((each) => each)), power = 10 ** Math.floor(Math.log10(most)), limit = power * [1, 2, 5, 10].find((step) => step * power >= most);
	card.hidden = !now.panels[panel];
	write(top, names.length ? number(limit, unit) : "");
	svg.replaceChildren(make("path", { d: `M0 2H100M0 50H100M0 98H100${pointed === null ? "" : `M${x[at]} 0V100`}` }), ...lines.map((line, k) => make("path", { class: `c${k}`,
		d: line.map((each, j) => each === undefined ? "" : `${line[j - 1] === undefined ? "M" : "L"}${x[j]} ${98 - 96 * each / limit}`).join("") })));
	list.replaceChildren(...names.map((name, k) => make("li", { class: `c${k}` }, `${visible(name).replaceAll("_", " ")} `, make("b", {}, number(lines[k][at], unit)))),
		...names.length ? [] : [now.panels[panel]?.error ?? "No data"]);
}

// missing returns why the role cannot have a button of a row, or "".
function missing(action, { subscription, mine }) {
	return now.standby ? "read-only: a standby" : !now.may[action] ? `${now.role} cannot ${action}` : subscription && !mine ? "belongs to another role" : "";
}

// fill shows the rows of a table. Rows and buttons that stay keep their elements, and with them the focus.
function fill(id, { rows = [], error } = now.panels[id] ?? {}) {
	const body = element(id).querySelector("tbody"), old = new Map([...body.rows].map((line) => [line.dataset.id, line]));
	const columns = Object.keys(rows[0] ?? {}).filter((column) => column !== "mine");
	element(id).hidden = id !== "keys" && !now.panels[id];
	write(element(id).querySelector("p"), error ?? (rows.length ? "" : "None"));
	element(id).querySelector("tr").replaceChildren(...columns.map((column) => make("th", { scope: "col" }, words(column))));
	const lines = rows.map((row) => {
		const key = JSON.stringify([row.subscription, row.partition, row.event_id, row.kind, row.process, row.prepared, row.key, row.scope]);
		const line = old.get(key) ?? make("tr", { "data-id": key }, ...columns.map((column) => make("td", { "data-label": words(column) })), make("td"));
		columns.forEach((column, i) => write(Object.assign(line.cells[i], { className: column === "state" ? row.state : "" }),
			row[column] === null ? "" : visible(row[column]) + (units[column] ?? "")));
		line.given = (buttons[id]?.(row) ?? []).map((button) => [...button, missing(button[0], row)]);
		const labels = JSON.stringify(line.given.map(([action, , , why]) => [action, why])), focused = line.contains(document.activeElement) && document.activeElement.textContent;
		if (line.dataset.labels !== labels) {
			line.dataset.labels = labels;
			line.lastChild.replaceChildren([...new Set(line.given.map((button) => button[3]))].filter(Boolean).join(", "), ...line.given.flatMap((button, i) => button[3] ? [] :
				make("button", { type: "button", click: () => confirm(...line.given[i]) }, words(button[0]))));
			focused && ([...line.querySelectorAll("button")].find((button) => button.textContent === focused) ?? line.querySelector("button"))?.focus();
		}
		old.delete(key);
		return line;
	});
	old.forEach((line) => line.remove());
	lines.forEach((line, i) => body.rows[i] === line || body.insertBefore(line, body.rows[i] ?? null));
}

// confirm asks before an action, and then calls it.
function confirm(action, values, effect) {
	write(element("question"), `${words(action)} ${values.map(visible).join(", ")}?`);
	write(element("effect"), `${effect} You are ${now.role} in database ${now.database}. The console logs the action.`);
	write(element("go"), words(action));
	element("confirm").returnValue = "";
	element("confirm").onclose = () => element("confirm").returnValue && ask("/action", JSON.stringify({ action, values })).then(({ result }) => result, ({ message }) => message)
		.then((result) => write(element("status"), `${words(action)} ${values.map(visible).join(", ")}: ${visible(result)}`)).then(refresh).then(search);
	element("confirm").showModal();
}

// refresh shows the state of the database. One follows the other, so that no older state replaces a newer one.
const refresh = () => shown = Promise.allSettled([shown]).then(async () => {
	now = await ask("/state");
	write(element("who"), `${now.role} in ${now.database}${["pause", "redrive", "forget"].some((action) => !missing(action, {})) ? "" : ", read-only"}`);
	Object.keys(tables).forEach((id) => id === "keys" || fill(id));
});

// search shows the keys that are wanted, and the numbers of all keys.
async function search() {
	const asked = wanted, { groups = [], sample, ...found } = await ask(`/keys?${new URLSearchParams(asked)}`).catch(({ message: error }) => ({ error }));
	if (asked !== wanted) // a newer search has begun
		return;
	const live = now.panels.tables.rows?.find(({ name }) => name === "key").live;
	element("groups").replaceChildren(...groups.map(({ scope, state, number }) => make("button", { type: "button",
		click: () => { const { elements } = element("search"); [elements.key.value, elements.scope.value] = ["", scope]; wanted = { scope, state }; search(); } }, `${visible(scope)} ${state} `, make("b", {}, number))),
		sample && live !== undefined ? `${live > sample ? `among the first ${number(sample, "")} of ` : ""}about ${number(live, "")} keys` : "");
	fill("keys", found);
}

element("search").onreset = () => { wanted = {}; search(); };
element("search").onsubmit = () => { wanted = Object.fromEntries([...new FormData(element("search"))].filter(([, text]) => text)); search(); return false; };
for (const [id, title] of Object.entries(tables)) {
	document.querySelector("nav").append(make("a", { href: `#${id}` }, title));
	document.querySelector("main").append(make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), ...id === "keys" ? [element("search")] : [],
		make("p"), make("table", {}, make("thead", {}, make("tr")), make("tbody"))));
}
for (;; await new Promise((done) => setTimeout(done, pause)))
	await refresh().then(() => {
		samples.push({ at: Date.now(), totals: charts.map(totals) });
		samples.splice(0, samples.findIndex(({ at }) => at > Date.now() - span));
		charts.forEach(draw);
		return samples.length > 1 || search();
	}).catch(({ message }) => element("who").replaceChildren(make("b", { class: "failing" }, message)));
