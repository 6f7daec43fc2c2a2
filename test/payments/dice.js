// Chance that can be played again: every decision has a name, and comes from the seed
// and that name alone, whatever the order in which decisions are made.

"use strict";

const { createHash } = require("crypto");

// dice returns a function that returns the next number in [0, 1) for the seed and the
// name.
function dice(seed, ...name) {
	let turn = 0;
	return () => createHash("sha256").update(JSON.stringify([seed, name, turn++]))
		.digest().readUInt32BE(0) / 2 ** 32;
}

// pick returns one of the choices, each as likely as its weight: [[choice, weight], ...].
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
