/*-------------------------------------------------------------------------
 *
 * tallies.h
 *	  The counters of both workloads.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_TALLIES_H
#define STRESS_TALLIES_H

/* In place of a minimum: the workload has no such event. */
#define ABSENT (-1)

/* All counters: name, text, and the minimum of a full run of retries, and of leases. */
#define TALLY_LIST(X)                                                                              \
	X(ATTEMPTS, "attempts", 1, 1)																   \
	X(EXPIRED, "expired rows planted", 1, 1)													   \
	X(CLAIMED, "claims granted; of leases, with one", 1, 1)										   \
	X(TAKEN_OVER, "leases taken over", ABSENT, 1)												   \
	X(COMPLETER, "taken over by completers", ABSENT, 1)											   \
	X(OPEN_CLAIMED, "claims without a lease", ABSENT, 1)										   \
	X(OPEN_TAKEN_OVER, "taken over without a lease", ABSENT, 1)									   \
	X(RESUMED, "resumed from a checkpoint", ABSENT, 1)											   \
	X(RENEWED, "heartbeats", ABSENT, 1)															   \
	X(CHECKPOINT, "checkpoints", ABSENT, 1)														   \
	X(CHARGED, "charges at the provider", ABSENT, 1)											   \
	X(CHARGED_AGAIN, "charges requested again", ABSENT, 1)										   \
	X(COMPLETED, "committed: completed", 1, 1)													   \
	X(FAILED, "committed: failed", 1, 1)														   \
	X(ONCE_NEW, "committed: once, new", 1, ABSENT)												   \
	X(RELEASED, "committed: released", 1, 1)													   \
	X(EVICTED, "evicted", ABSENT, 1)															   \
	X(UNREAD, "COMMIT sent, reply not read", 1, 1)												   \
	X(REPLAYED, "replayed", 1, 1)																   \
	X(ONCE_SEEN, "once, seen before", 1, ABSENT)												   \
	X(IN_PROGRESS, "in_progress", 1, 1)															   \
	X(MISMATCHED, "mismatched", 1, 1)															   \
	X(ROLLED_BACK, "rolled back by the client", 1, ABSENT)										   \
	X(SAVEPOINT, "rolled back to a savepoint", 1, ABSENT)										   \
	X(PREPARED, "prepared, or unknown", 1, ABSENT)												   \
	X(PREPARED_COMMITTED, "committed, prepared", 1, ABSENT)										   \
	X(PREPARED_ROLLED_BACK, "rolled back, prepared", 1, ABSENT)									   \
	X(DIED, "workers died", ABSENT, 1)															   \
	X(STALLED, "workers stalled", ABSENT, 1)													   \
	X(ZOMBIES, "former owners rejected", ABSENT, 1)												   \
	X(LATE, "finished after the lease expired", ABSENT, 1)										   \
	X(RECONNECTED, "workers reconnected", ABSENT, 1)											   \
	X(REJECTED, "COMMIT rejected after IK410", ABSENT, 1)										   \
	X(IK403, "IK403 write without a claim", 1, 1)												   \
	X(IK409, "IK409 in progress", 1, 1)															   \
	X(IK410, "IK410 lease lost", ABSENT, 1)														   \
	X(IK412, "IK412 no claim", 1, ABSENT)														   \
	X(IK422, "IK422 another request", 1, 1)														   \
	X(IK428, "IK428 not completed", 1, 0)														   \
	X(SERIALIZATION, "40001 serialization failure", 1, 1)										   \
	X(DEADLOCK, "40P01 deadlock", 1, 0)															   \
	X(CANCELLED, "57014 cancelled", 1, 1)														   \
	X(LOCK_TIMEOUT, "55P03 lock_timeout", 1, 0)													   \
	X(TRANSIENT, "ST001 transient failure", 1, ABSENT)											   \
	X(CANCELS, "cancels sent", 1, 1)															   \
	X(DROPPED, "connections dropped", 1, 1)														   \
	X(TERMINATIONS, "terminations sent", 1, 1)													   \
	X(TERMINATED, "connections terminated", 1, 1)												   \
	X(KILLED, "backends killed by SIGKILL", ABSENT, 1)											   \
	X(SHORT_LIVED, "rows left to the reaper", ABSENT, 0)										   \
	X(REAPED, "rows reaped", ABSENT, 0)															   \
	X(MAINTENANCE, "VACUUM, REINDEX and such", 0, 0)

#endif /* STRESS_TALLIES_H */
