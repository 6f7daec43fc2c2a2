// node serve.js FRAMEWORK CLIENT: a service of test/clients/http/play. Prints its port.

"use strict";

const makeClient = require("./clients.js");
const makeService = require("./service.js");

async function main([framework, client]) {
	require(`./${framework}.js`)(makeService(await makeClient(client, process.env.PGHOST), await makeClient(client, "/nonexistent")));
}

main(process.argv.slice(2));
