// Headless Chromium, driven through chromedriver with the W3C WebDriver protocol.

"use strict";

const { spawn } = require("child_process");
const { mkdtempSync, rmSync } = require("fs");
const http = require("http");
const { join } = require("path");
const { setTimeout: sleep } = require("timers/promises");

// Time limit of every wait, in milliseconds.
const patience = 60000;

// Chromium connects only to loopback, and stores nothing. Loopback has a second name,
// because a page at 127.0.0.1 has privileges that others have only over https.
const flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
	"--disable-background-networking", "--disable-component-update", "--disable-sync",
	"--disable-dev-shm-usage", "--no-proxy-server",
	"--host-resolver-rules=MAP payments.test 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"];

// Keys of the keyboard, as the protocol names them.
const keys = { tab: "\ue004", enter: "\ue007" };

// The key of an element in replies of the protocol.
const reference = "element-6066-11e4-a52e-4f735466cecf";

class Browser {
	// start starts chromedriver and Chromium in a new directory.
	static async start() {
		const browser = new Browser();
		browser.home = mkdtempSync("/tmp/idempotency-browser.");
		browser.driver = spawn("chromedriver", ["--port=0"], { detached: true,
			env: { ...process.env, HOME: browser.home }, stdio: ["ignore", "pipe", "inherit"] });
		process.once("exit", () => browser.end());
		for (const signal of ["SIGHUP", "SIGINT", "SIGTERM"])
			process.once(signal, () => process.exit(130));
		browser.port = await new Promise((done, failed) => {
			let said = "";
			browser.driver.on("error", failed);
			browser.driver.on("exit", () => failed(new Error(`chromedriver ended: ${said}`)));
			browser.driver.stdout.on("data", (text) => {
				said += text;
				const port = /successfully on port ([0-9]+)/.exec(said);
				if (port)
					done(Number(port[1]));
			});
		});
		browser.session = "";
		const { sessionId } = await browser.ask("POST", "/session", { capabilities: { alwaysMatch: {
			timeouts: { script: 2 * patience },
			"goog:chromeOptions": { args: [...flags, `--user-data-dir=${join(browser.home, "profile")}`] } } } });
		browser.session = `/session/${sessionId}`;
		return browser;
	}

	// stop closes the browser.
	async stop() {
		await this.ask("DELETE", "", null);
		this.end();
	}

	// end kills the remaining processes, and removes the directory.
	end() {
		try {
			process.kill(-this.driver.pid, "SIGKILL");
		} catch {
			// The process has ended.
		}
		rmSync(this.home, { recursive: true, force: true, maxRetries: 10 });
	}

	// ask sends one command of the session, and returns its value.
	ask(method, path, parameters) {
		const body = parameters === null ? "" : JSON.stringify(parameters);
		return new Promise((done, failed) => {
			const request = http.request({ host: "127.0.0.1", port: this.port, method,
				path: (this.session ?? "") + path, agent: false,
				headers: { "Content-Type": "application/json", "Content-Length": Buffer.byteLength(body) } });
			request.on("error", failed);
			request.on("response", async (response) => {
				let text = "";
				response.setEncoding("utf8");
				for await (const part of response)
					text += part;
				const { value } = JSON.parse(text);
				if (response.statusCode === 200)
					done(value);
				else
					failed(new Error(`${path}: ${value.error}: ${value.message}`));
			});
			request.end(body);
		});
	}

	// open loads a page in this tab.
	open(url) {
		return this.ask("POST", "/url", { url });
	}

	// tab returns the handle of this tab, newTab opens another one, and go switches to
	// a tab.
	tab() {
		return this.ask("GET", "/window", null);
	}

	async newTab() {
		return (await this.ask("POST", "/window/new", { type: "tab" })).handle;
	}

	go(handle) {
		return this.ask("POST", "/window", { handle });
	}

	// close closes this tab.
	close() {
		return this.ask("DELETE", "/window", null);
	}

	// evaluate runs a function body in the page, and returns its result.
	evaluate(script, ...args) {
		return this.ask("POST", "/execute/sync", { script, args });
	}

	// click clicks an element so many times.
	async click(selector, times = 1) {
		const element = await this.ask("POST", "/element", { using: "css selector", value: selector });
		const press = [{ type: "pointerDown", button: 0 }, { type: "pointerUp", button: 0 }];
		await this.ask("POST", "/actions", { actions: [{ type: "pointer", id: "mouse",
			parameters: { pointerType: "mouse" }, actions: [
				{ type: "pointerMove", duration: 0, origin: { [reference]: element[reference] }, x: 0, y: 0 },
				...Array.from({ length: times }, () => press).flat()] }] });
	}

	// key presses a key, such as keys.enter, on the element that has the focus.
	key(value) {
		return this.ask("POST", "/actions", { actions: [{ type: "key", id: "keyboard",
			actions: [{ type: "keyDown", value }, { type: "keyUp", value }] }] });
	}

	// spoken returns what a screen reader says of an element: its role and its name.
	async spoken(selector) {
		const element = (await this.ask("POST", "/element", { using: "css selector", value: selector }))[reference];
		return Promise.all(["computedrole", "computedlabel"].map((what) => this.ask("GET", `/element/${element}/${what}`, null)));
	}

	// show sets the size and the colour scheme of the page. A pixel of the page is less than
	// one of the image, so that images are small.
	async show(width, height, scheme) {
		await this.devtools("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: 0.8, mobile: false });
		await this.devtools("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: scheme }] });
	}

	// picture returns an image of the top of the page, at that size and in that scheme.
	async picture(width, height, scheme, format = "png") {
		await this.show(width, height, scheme);
		await this.evaluate("document.documentElement.style.scrollbarWidth = 'none'; scrollTo(0, 0); document.activeElement.blur()");
		const { data } = await this.devtools("Page.captureScreenshot", { format });
		await this.evaluate("document.documentElement.style.scrollbarWidth = ''");
		return Buffer.from(data, "base64");
	}

	// unreadable returns how many pixels the page is too wide, and the texts of its main part whose contrast is too low
	// (WCAG 2, 1.4.3).
	unreadable() {
		return this.evaluate(`
			const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
			const luminance = (colour) => channels(colour).slice(0, 3).map((value) => value / 255)
				.map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
				.reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
			const ground = (element) => {
				const colour = getComputedStyle(element).backgroundColor;
				return channels(colour)[3] === 0 ? ground(element.parentElement) : colour;
			};
			const contrast = (element) => {
				const [dark, light] = [getComputedStyle(element).color, ground(element)].map(luminance).sort((a, b) => a - b);
				return (light + 0.05) / (dark + 0.05);
			};
			const faint = [...document.querySelectorAll("main *")].filter((element) => element.checkVisibility() &&
				[...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()) && contrast(element) < 4.5);
			const { scrollWidth, clientWidth } = document.documentElement;
			return { overflow: scrollWidth - clientWidth, faint: faint.map((element) => element.outerHTML) };`);
	}

	// devtools sends a command of the Chrome DevTools Protocol.
	devtools(cmd, params) {
		return this.ask("POST", "/goog/cdp/execute", { cmd, params });
	}

	// type replaces the text of a field.
	async type(selector, text) {
		const element = (await this.ask("POST", "/element", { using: "css selector", value: selector }))[reference];
		await this.ask("POST", `/element/${element}/clear`, {});
		await this.ask("POST", `/element/${element}/value`, { text });
	}
}

// until repeats a query until its result is truthy, and returns the result.
async function until(what, question, limit = patience) {
	const end = Date.now() + limit;
	for (;;) {
		const answer = await question();
		if (answer)
			return answer;
		if (Date.now() > end)
			throw new Error(`not within ${limit / 1000} s: ${what}`);
		await sleep(10);
	}
}

// reported plays a scenario, and prints how it ends. A failure sets the exit code of the program.
async function reported(scenario, play) {
	const began = Date.now();
	try {
		await play();
		console.log(`     ${scenario.padEnd(58)} ${((Date.now() - began) / 1000).toFixed(1)} s   ok`);
	} catch (error) {
		console.log(`     ${scenario.padEnd(58)}   WRONG\n${error.stack}`);
		process.exitCode = 1;
	}
}

module.exports = { Browser, keys, reported, until };
