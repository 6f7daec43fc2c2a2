// Arguments of calls. All are sent as text, with casts in the statement, because each driver
// encodes other types in its own way.

"use strict";

// refuse throws what the server would raise for a missing or malformed key.
function refuse(message) {
	throw Object.assign(new TypeError(message), { code: "IK400" });
}

// isPromise tells whether an await is missing.
const isPromise = (value) => typeof value?.then === "function";

// keyText returns a scope, a key or a part of one as text. An object would be the same key for
// every operation, and a number above 2^53 that of its neighbours.
function keyText(name, value) {
	if (typeof value === "string")
		return value;
	if (typeof value === "bigint" || Number.isSafeInteger(value))
		return String(value);
	if (typeof value === "number")
		return refuse(`${name} ${value} is no integer that JavaScript represents exactly: pass a string or a BigInt`);
	return refuse(`${name} must be a string, a BigInt or an integer, not ${isPromise(value) ? "a Promise: await it" : value === null ? "null" : `of type ${typeof value}`}`);
}

// jsonText returns a value as the text of JSON, and null for undefined, which is SQL's NULL.
function jsonText(name, value) {
	if (value === undefined)
		return null;
	if (isPromise(value))
		return refuse(`${name} is a Promise: await it`);
	const text = JSON.stringify(value);
	return text ?? refuse(`${name} has no form in JSON: it is a ${typeof value}`);
}

// requestText is jsonText of the request of an operation. A misspelt field would be undefined, and
// match every other request.
function requestText(options) {
	if ("request" in options && options.request === undefined)
		refuse("the request is undefined: leave the option out if the operation has no request");
	return jsonText("the request", options.request);
}

// plainText returns an optional text, or the number of a duration in seconds, and null for undefined.
const plainText = (value) => value === undefined || value === null ? null : String(value);

// parsed returns the value of a JSON text; undefined if there is none.
const parsed = (text) => text === null || text === undefined ? undefined : JSON.parse(text);

module.exports = { jsonText, keyText, parsed, plainText, refuse, requestText };
