// Compares the description of the API with the responses of the service. It supports
// the part of OpenAPI 3.1 that the description uses, and rejects other parts, so that
// everything in the description is checked.

"use strict";

const assert = require("assert/strict");

// Description is an OpenAPI document, and the responses seen so far.
class Description {
	constructor(document) {
		this.document = document;
		this.seen = new Set();
	}

	// resolve follows a reference.
	resolve(thing) {
		if (!thing.$ref)
			return thing;
		assert.match(thing.$ref, /^#\//);
		const found = thing.$ref.slice(2).split("/").reduce((at, name) => at && at[name], this.document);
		assert.ok(found, `${thing.$ref} leads nowhere`);
		return this.resolve(found);
	}

	// operation returns the operation for a method and a path, and the path's template.
	operation(method, path) {
		for (const [template, operations] of Object.entries(this.document.paths))
			if (new RegExp(`^${template.replace(/\{\w+\}/g, "[^/]+")}$`).test(path.split("?")[0]))
				return { template, operation: operations[method.toLowerCase()] };
		return {};
	}

	// statuses lists all described responses, as "POST /charges 201".
	statuses() {
		return Object.entries(this.document.paths).flatMap(([template, operations]) =>
			Object.entries(operations).flatMap(([method, { responses }]) =>
				Object.keys(responses).map((status) => `${method.toUpperCase()} ${template} ${status}`)));
	}

	// check checks one response against the description: its status, headers, type and
	// body.
	check(method, path, answer) {
		const { template, operation } = this.operation(method, path);
		const name = `${method} ${template} ${answer.status}`;
		assert.ok(operation, `${method} ${path} is not described`);
		const response = this.resolve(operation.responses[answer.status] || assert.fail(`${name} is not described`));
		for (const [header, reference] of Object.entries(response.headers || {})) {
			const { required, schema } = this.resolve(reference);
			const value = answer.headers[header.toLowerCase()];
			if (value !== undefined || required)
				this.validate(schema, value, `${name}: ${header}`);
		}
		for (const header of ["location", "retry-after", "idempotent-replayed", "www-authenticate"])
			assert.ok(!(header in answer.headers) || Object.keys(response.headers || {})
				.some((described) => described.toLowerCase() === header), `${name}: ${header} is not described`);
		const content = response.content[answer.headers["content-type"]];
		assert.ok(content, `${name}: ${answer.headers["content-type"]} is not described`);
		this.validate(content.schema, JSON.parse(answer.body), name);
		this.seen.add(name);
	}

	// accepts returns whether a body is valid for an operation.
	accepts(method, path, body) {
		const { operation } = this.operation(method, path);
		try {
			this.validate(operation.requestBody.content["application/json"].schema, body, path);
			return true;
		} catch (error) {
			if (error instanceof assert.AssertionError)
				return false;
			throw error;
		}
	}

	// validate checks a value against a schema.
	validate(reference, value, where) {
		const schema = this.resolve(reference);
		const rules = {
			type: (types) => assert.ok([types].flat().some((type) => isOfType(type, value)), `${where}: not ${types}`),
			enum: (values) => assert.ok(values.includes(value), `${where}: not one of ${values}`),
			minimum: (least) => assert.ok(typeof value !== "number" || value >= least, `${where}: below ${least}`),
			maximum: (most) => assert.ok(typeof value !== "number" || value <= most, `${where}: above ${most}`),
			maxLength: (most) => assert.ok(typeof value !== "string" || [...value].length <= most, `${where}: too long`),
			pattern: (pattern) => assert.ok(typeof value !== "string" || new RegExp(pattern, "u").test(value), `${where}: ${value}`),
			format: (format) => {
				assert.equal(format, "date-time");
				assert.match(value, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:\d\d|Z)$/, where);
			},
			required: (names) => names.forEach((name) => assert.ok(Object.hasOwn(value, name), `${where}: no ${name}`)),
			properties: (members) => Object.entries(members).forEach(([name, member]) => {
				if (Object.hasOwn(value, name))
					this.validate(member, value[name], `${where}.${name}`);
			}),
			additionalProperties: (allowed) => {
				assert.equal(allowed, false);
				for (const name of Object.keys(value))
					assert.ok(Object.hasOwn(schema.properties, name), `${where}: ${name} is not described`);
			},
			items: (item) => value.forEach((element, i) => this.validate(item, element, `${where}[${i}]`)),
			description: () => {},
			default: () => {},
		};
		for (const [rule, argument] of Object.entries(schema)) {
			if (!Object.hasOwn(rules, rule))
				throw new Error(`${where}: unsupported keyword ${rule}`);
			rules[rule](argument);
		}
	}
}

// isOfType returns whether a value has a type of JSON Schema.
function isOfType(type, value) {
	switch (type) {
	case "null": return value === null;
	case "array": return Array.isArray(value);
	case "integer": return Number.isInteger(value);
	case "object": return typeof value === "object" && value !== null && !Array.isArray(value);
	case "string": return typeof value === "string";
	default: throw new Error(`unsupported type ${type}`);
	}
}

module.exports = { Description };
