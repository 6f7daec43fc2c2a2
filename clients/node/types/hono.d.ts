import type { Context, Handler as Route } from "hono";
import type { Handler, Options } from "./http.js";

export function hono<Tx>(options: Options<Context, Tx>, handler: Handler<Context, Tx>): Route;
export { hono as idempotent };
