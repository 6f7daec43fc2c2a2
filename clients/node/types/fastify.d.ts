import type { FastifyRequest, preParsingHookHandler, RouteHandlerMethod } from "fastify";
import type { Handler, Options } from "./http.js";

export function fastify<Tx>(options: Options<FastifyRequest, Tx>, handler: Handler<FastifyRequest, Tx>):
	{ preParsing: preParsingHookHandler; handler: RouteHandlerMethod };
export { fastify as idempotent };
