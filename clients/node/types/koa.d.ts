import type { Context, Middleware } from "koa";
import type { Handler, Options } from "./http.js";

export function koa<Tx>(options: Options<Context, Tx>, handler: Handler<Context, Tx>): Middleware;
export { koa as idempotent };
