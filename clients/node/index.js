"use strict";

const { Failure, claim, complete, consume, deriveKey, fail, isTransient, lease, once, onceMany, publish, release, retrying, run, sqlState,
	tryClaim } = require("./lib/core.js");
const { drizzle, knex, kysely, mikroorm, pg, postgres, prisma, sequelize, typeorm } = require("./lib/adapters.js");

module.exports = {
	Failure, claim, complete, consume, deriveKey, fail, isTransient, lease, once, onceMany, publish, release, retrying, run, sqlState, tryClaim,
	drizzle, knex, kysely, mikroorm, pg, postgres, prisma, sequelize, typeorm,
};
