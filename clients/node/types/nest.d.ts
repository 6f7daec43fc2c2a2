import type { CallHandler, ExecutionContext, NestInterceptor } from "@nestjs/common";
import type { Options, Session } from "./http.js";

export class IdempotencyInterceptor<Tx = any> implements NestInterceptor {
	constructor(options: Options<any, Tx>);
	intercept(context: ExecutionContext, next: CallHandler): Promise<any>;
}
/** The ORM's transaction of the request. */
export function transaction<Tx = any>(): Tx;
/** The session of the request, for calls of pg-idempotency. */
export function session<Tx = any>(): Session<Tx>;
