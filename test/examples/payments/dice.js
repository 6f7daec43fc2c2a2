// Reproducible random numbers: every decision has a name, and depends only on the seed
// and that name, not on the order of decisions.

"use strict";

const { createHash } = require("crypto");

// dice returns a function that returns the next number in [0, 1) for the seed and the
// name.
function dice(seed, ...name) {
	let count = 0;
	return () => createHash("sha256").update(JSON.stringify([seed, name, count++]))
		.digest().readUInt32BE(0) / 2 ** 32;
}

// pick returns one of the choices with probability proportional to its weight:
// [[choice, weight], ...].
function pick(choices, roll) {
	let point = roll * choices.reduce((sum, [, weight]) => sum + weight, 0);
	for (const [choice, weight] of choices) {
		point -= weight;
		if (point < 0)
			return choice;
	}
	return choices[choices.length - 1][0];
}

module.exports = { dice, pick };
