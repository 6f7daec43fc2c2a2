// Writes numbers.csv: doubles in the format of ECMAScript.
//
//	node test/numbers.js > test/numbers.csv
//
// The columns are the shortest decimal in exponent form (toExponential) and the form of
// RFC 8785 (JSON.stringify). The sample has some numbers of each kind that conversions
// treat in a different way. Every run gives the same ones: the random bits are SHA-256 of
// a counter.

"use strict";

const { createHash } = require("crypto");

const view = new DataView(new ArrayBuffer(8));
const sample = new Map();
let counter = 0;

// random returns 64 bits as a BigInt.
function random() {
	return createHash("sha256").update(`numbers ${counter++}`).digest().readBigUInt64BE(0);
}

// fromBits returns the double with these bits.
function fromBits(bits) {
	view.setBigUint64(0, BigInt.asUintN(64, bits));
	return view.getFloat64(0);
}

// toBits returns the bits of a double.
function toBits(value) {
	view.setFloat64(0, value);
	return view.getBigUint64(0);
}

// add adds a double to the sample, unless JSON cannot represent it.
function add(value) {
	if (Number.isFinite(value))
		sample.set(value.toExponential(), JSON.stringify(value));
}

// addAround adds a double and its two neighbours.
function addAround(value, neighbours) {
	const bits = toBits(value);
	for (let i = -neighbours; i <= neighbours; i++)
		if (bits + BigInt(i) >= 0n)
			add(fromBits(bits + BigInt(i)));
}

// The edges: zeros, the smallest and largest, where the exponent form begins.
add(0);
add(-0);
addAround(Number.MIN_VALUE, 1);
addAround(2 ** -1022, 3);
addAround(Number.MAX_VALUE, 3);
for (const edge of [1e21, 1e-6, 1e-7, 1e20, 1e22, 1e23, 123456789e13])
	for (const sign of [1, -1])
		addAround(sign * edge, 5);

// Powers of two, of ten, and the neighbours of those.
for (let exponent = -1074; exponent <= 1023; exponent += 17)
	add(2 ** exponent);
for (let exponent = -323; exponent <= 308; exponent += 11)
	addAround(Number(`1e${exponent}`), 1);

// Integers from which on doubles skip some.
for (let i = -5; i <= 5; i++) {
	add(2 ** 53 + i);
	add(-(2 ** 53) + i);
}

// Decimals half-way between two doubles: an odd number of 54 bits times a power of two,
// with enough factors of five to need few digits.
for (let fives = 6n; fives <= 22n; fives++) {
	const low = 2n ** 53n / 5n ** fives;
	const odd = (low + random() % low) | 1n;
	const shift = fives + random() % 16n;
	addAround(Number(odd * 5n ** fives * 2n ** shift), 1);
}

// Integers of every size, and amounts of money.
for (let i = 0; i < 30; i++) {
	add(Number(BigInt.asIntN(64, random()) >> (random() % 64n)));
	add(Number(random() % 10n ** 13n) / 100);
}

// Subnormal numbers of every size.
for (let i = 0; i < 40; i++)
	add(fromBits((random() & 0xFFFFFFFFFFFFFn) >> (random() % 52n)));

// Random bits.
while (sample.size < 700)
	add(fromBits(random()));

let text = "";
for (const [input, expected] of sample)
	text += `${input},${expected}\n`;
process.stdout.write(text);
