import type { Adapter, Duration, Failure, Session } from "../index.js";

export interface Options<Request, Tx> {
	db: Adapter<Tx>;
	/** The user or tenant of a request: its keys are separate from those of others. */
	scope(request: Request): string | Promise<string>;
	/** Headers of an answer that are stored and replayed. Content-Type always is. */
	headers?: string[];
	/** JSON pointers of members of the body that may differ in a retry. */
	omit?: string[];
	/** Also take a key without quotes. */
	lenient?: boolean;
	/** How long a duplicate waits for the first request before it gets 409. */
	wait?: Duration;
	/** How long the answer is replayed. */
	retention?: Duration;
	/** The largest body of a request, in bytes. */
	maxBody?: number;
}

/** Without a Content-Type the body is JSON; with another one a text or bytes. */
export type Answer = { status?: number; headers?: Record<string, string | string[]>; body?: unknown } | Response;

export type Handler<Request, Tx> = (request: Request, tx: Tx, session: Session<Tx>) => Promise<Answer> | Answer;
export { Adapter, Failure, Session };
