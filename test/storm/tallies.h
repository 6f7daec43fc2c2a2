/*-------------------------------------------------------------------------
 *
 * tallies.h
 *	  The counters of this driver.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_TALLIES_H
#define STORM_TALLIES_H

/* Runs with fewer operations or clients need not reach all minimums. */
#define FULL_RUN 1000
#define FULL_CLIENTS 8

/* All counters: name, text, and the minimum of a full run. */
#define TALLY_LIST(X)                                                                              \
	X(ATTEMPTS, "attempts", 1)                                                                     \
	X(EXPIRED, "expired records planted", 1)                                                       \
	X(CLAIMED, "leases granted", 1)                                                                \
	X(TAKEN_OVER, "leases taken over", 1)                                                          \
	X(COMPLETER, "taken over by completers", 1)                                                    \
	X(OPEN_CLAIMED, "claims without a lease", 1)                                                   \
	X(OPEN_TAKEN_OVER, "taken over without a lease", 1)                                            \
	X(RESUMED, "resumed from a checkpoint", 1)                                                     \
	X(RENEWED, "heartbeats", 1)                                                                    \
	X(CHECKPOINT, "checkpoints", 1)                                                                \
	X(CHARGED, "charges at the provider", 1)                                                       \
	X(CHARGED_AGAIN, "charges requested again", 1)                                                 \
	X(COMPLETED, "committed: completed", 1)                                                        \
	X(FAILED, "committed: failed", 1)                                                              \
	X(RELEASED, "released", 1)                                                                     \
	X(EVICTED, "evicted", 1)                                                                       \
	X(REPLAYED, "replayed", 1)                                                                     \
	X(IN_PROGRESS, "in_progress", 1)                                                               \
	X(MISMATCHED, "mismatched", 1)                                                                 \
	X(DIED, "workers died", 1)                                                                     \
	X(STALLED, "workers stalled", 1)                                                               \
	X(ZOMBIES, "former owners rejected", 1)                                                        \
	X(LATE, "finished after the lease expired", 1)                                                 \
	X(RECONNECTED, "workers reconnected", 1)                                                       \
	X(UNREAD, "COMMIT sent, reply not read", 1)                                                    \
	X(REJECTED, "COMMIT rejected after IK410", 1)                                                  \
	X(IK403, "IK403 write without a claim", 1)                                                     \
	X(IK409, "IK409 in progress", 1)                                                               \
	X(IK410, "IK410 lease lost", 1)                                                                \
	X(IK422, "IK422 another request", 1)                                                           \
	X(IK428, "IK428 not completed", 0)                                                             \
	X(SERIALIZATION, "40001 serialization failure", 1)                                             \
	X(DEADLOCK, "40P01 deadlock", 0)                                                               \
	X(CANCELLED, "57014 cancelled", 1)                                                             \
	X(LOCK_TIMEOUT, "55P03 lock_timeout", 0)                                                       \
	X(CANCELS, "cancels sent", 1)                                                                  \
	X(DROPPED, "connections dropped", 1)                                                           \
	X(TERMINATIONS, "terminations sent", 1)                                                        \
	X(TERMINATED, "connections terminated", 1)                                                     \
	X(KILLED, "backends killed by SIGKILL", 1)                                                     \
	X(SHORT_LIVED, "rows left to the reaper", 0)                                                   \
	X(REAPED, "rows reaped", 0)                                                                    \
	X(MAINTENANCE, "VACUUM, REINDEX and such", 0)

#endif /* STORM_TALLIES_H */
