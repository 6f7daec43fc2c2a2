/** A scope, a key or a part of one. Numbers above 2^53 must be strings or BigInts. */
export type Key = string | number | bigint;

/** A duration such as "30 seconds", or a number of seconds. */
export type Duration = string | number;

/** Runs calls: in a transaction, or in autocommit. */
export interface Session<Tx = any> {
	/** The transaction of the driver or ORM. */
	readonly tx: Tx;
	query(text: string, values?: unknown[]): Promise<any[]>;
}

/** An adapter of a driver or ORM; as a session, it runs each call in autocommit. */
export interface Adapter<Tx = any> extends Session {
	/** Calls work in a transaction of the driver or ORM. */
	transaction<Result>(work: (session: Session<Tx>) => Promise<Result>): Promise<Result>;
	/** The session of a transaction that the application began. */
	with(tx: Tx): Session<Tx>;
}

export interface ClaimOptions {
	/** What the client asks for. A retry with another request is refused (IK422). */
	request?: unknown;
	/** The duration of a lease; without one, the claim belongs to the transaction. */
	lease?: Duration;
	/** How long to wait for another owner. */
	wait?: Duration;
	/** How long the outcome is replayed. */
	retention?: Duration;
}

export interface Operation<Response = any> {
	outcome: "claimed" | "taken_over" | "replayed" | "in_progress" | "mismatched";
	replayed: boolean;
	failed: boolean;
	status?: number;
	headers?: Record<string, string>;
	response?: Response;
	/** The response byte for byte: JSON.parse rounds numbers above 2^53. */
	responseText?: string;
	token?: string;
	attempt?: number;
	recoveryPoint?: string;
	state?: any;
	retryAfter?: number;
	expiresAt?: Date | string;
}

export interface FinishOptions {
	status?: number;
	headers?: Record<string, string>;
	token?: string;
	retention?: Duration;
	/** Store the outcome without a response that is too large. */
	omitLarge?: boolean;
}

export type Result<Response = any> = Pick<Operation<Response>, "outcome" | "replayed" | "failed" | "status" | "headers" | "response" | "responseText" | "attempt">;

/** The final failure of an operation: the writes of the handler are undone, and retries get the response. */
export class Failure extends Error {
	constructor(response: unknown, status?: number, headers?: Record<string, string>);
	response: unknown;
	status: number;
	headers?: Record<string, string>;
}

export function claim(session: Session, scope: Key, key: Key, options?: ClaimOptions): Promise<Operation>;
export function tryClaim(session: Session, scope: Key, key: Key, options?: ClaimOptions): Promise<Operation>;
export function complete<Response>(session: Session, scope: Key, key: Key, response?: Response, options?: FinishOptions): Promise<Response>;
export function fail<Response>(session: Session, scope: Key, key: Key, response: Response, options: FinishOptions & { status: number }): Promise<Response>;
export function release(session: Session, scope: Key, key: Key, options?: { token?: string }): Promise<void>;
export function once(session: Session, scope: Key, key: Key, options?: { retention?: Duration }): Promise<boolean>;
export function onceMany(session: Session, scope: Key, keys: Key[], options?: { retention?: Duration }): Promise<string[]>;
export function deriveKey(session: Session, scope: Key, key: Key, step: Key): Promise<string>;

export interface PublishOptions {
	aggregateId?: Key;
	type?: string;
	headers?: Record<string, unknown>;
	eventId?: string;
	deliverAt?: Date | string;
}

export function publish(session: Session, topic: string, payload: unknown, options?: PublishOptions): Promise<string>;

/** Runs work once: claim, writes and result commit in one transaction, and a retry gets the result. */
export function run<Tx, Response>(db: Adapter<Tx>, scope: Key, key: Key, options: Omit<ClaimOptions, "lease"> & Omit<FinishOptions, "token">,
	work: (tx: Tx, session: Session<Tx>) => Promise<Response>): Promise<Result<Response>>;

export interface Lease<Tx = any> {
	readonly token: string;
	readonly attempt: number;
	/** Where the previous owner was, and its state. */
	readonly recoveryPoint?: string;
	readonly state?: any;
	/** Aborts when the lease is lost. */
	readonly signal: AbortSignal;
	renew(session: Session): Promise<void>;
	checkpoint(recoveryPoint: string, state?: unknown): Promise<void>;
	/** The key of a step, such as that for a provider; the next owner gets the same. */
	deriveKey(step: Key): Promise<string>;
	/** Runs the last step in a transaction that stores its result. */
	complete<Response>(work: (tx: Tx, session: Session<Tx>) => Promise<Response> | Response, options?: FinishOptions): Promise<Response>;
}

/** Runs work once, outside of a transaction, with a heartbeat at a third of the lease. */
export function lease<Tx, Response>(db: Adapter<Tx>, scope: Key, key: Key, options: ClaimOptions & Omit<FinishOptions, "token"> & { lease: Duration },
	work: (lease: Lease<Tx>) => Promise<Response>): Promise<Result<Response>>;

export interface Event<Payload = any> {
	seq: string;
	id: string;
	topic: string;
	aggregateId?: string;
	type?: string;
	payload: Payload;
	headers?: Record<string, any>;
	attempt: number;
}

export interface ConsumeOptions {
	/** Ends the loop after the event in progress, and returns the rest of its batch. */
	signal?: AbortSignal;
	maxEvents?: number;
	wait?: Duration;
	lease?: Duration;
	/** Ends the loop when no events are left. */
	untilEmpty?: boolean;
}

/** Calls the handler for each event. An error is reported: the event is retried, or a dead letter if error.dead is true. */
export function consume<Payload = any>(db: Adapter, subscription: string,
	handler: (event: Event<Payload>, context: { signal: AbortSignal }) => unknown, options?: ConsumeOptions): Promise<void>;

/** Calls work until it succeeds, with growing pauses, while the error is transient. work must begin with a claim of the same key. */
export function retrying<Result>(work: () => Promise<Result>, options?: { seconds?: number; signal?: AbortSignal }): Promise<Result>;

/** The SQLSTATE of an error, through the wrappers of each ORM. */
export function sqlState(error: unknown): string | undefined;

/** Tells whether the same call can succeed later. */
export function isTransient(error: unknown): boolean;

type TxOf<Function> = Function extends (work: (tx: infer Tx) => any, ...others: any[]) => any ? Tx : any;

export interface PgClient {
	query(text: string, values?: any[]): Promise<{ rows: any[] }>;
}

export function pg<Tx = PgClient>(pool: { connect(...args: any[]): any; query(...args: any[]): any }): Adapter<Tx>;
export function postgres<Tx = any>(sql: { begin(...args: any[]): any; unsafe(...args: any[]): any }): Adapter<Tx>;
export function prisma<Client extends { $transaction(...args: any[]): any; $queryRawUnsafe(...args: any[]): any }>(client: Client,
	options?: { maxWait?: number; timeout?: number; isolationLevel?: any }):
	Adapter<Omit<Client, "$transaction" | "$connect" | "$disconnect" | "$on" | "$use" | "$extends">>;
export function drizzle<Db extends { transaction(...args: any[]): any; execute(...args: any[]): any }>(db: Db, sql: (...args: any[]) => any):
	Adapter<TxOf<Db["transaction"]>>;
export function kysely<Db extends { transaction(): { execute(...args: any[]): any }; executeQuery(...args: any[]): any }>(db: Db,
	CompiledQuery: { raw(text: string, values: any[]): any }): Adapter<TxOf<ReturnType<Db["transaction"]>["execute"]>>;
export function typeorm<Source extends { manager: any; transaction(...args: any[]): any }>(dataSource: Source): Adapter<Source["manager"]>;
export function sequelize<Tx = any>(db: { transaction(...args: any[]): any; query(...args: any[]): any }): Adapter<Tx>;
export function mikroorm<Orm extends { em: any }>(orm: Orm): Adapter<Orm["em"]>;
export function knex<Tx = any>(db: { transaction(...args: any[]): any; raw(...args: any[]): any }): Adapter<Tx>;
