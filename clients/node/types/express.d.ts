import type { Request, RequestHandler } from "express";
import type { IncomingMessage, ServerResponse } from "node:http";
import type { Handler, Options } from "./http.js";

export function express<Tx>(options: Options<Request, Tx>, handler: Handler<Request, Tx>): RequestHandler;
export { express as idempotent };
/** The option verify of express.json(), if a parser comes first. */
export function keepBody(request: IncomingMessage, response: ServerResponse, bytes: Buffer): void;
