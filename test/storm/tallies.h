/*-------------------------------------------------------------------------
 *
 * tallies.h
 *	  What this driver counts.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_TALLIES_H
#define STORM_TALLIES_H

/* Runs with fewer operations or clients need not show everything. */
#define FULL_RUN 1000
#define FULL_HOUSE 8

/* Everything that is counted: name, text, and the least a full run must show. */
#define TALLY_LIST(X)                                                                              \
	X(ATTEMPTS, "attempts", 1)                                                                     \
	X(EXPIRED, "expired records planted", 1)                                                       \
	X(CLAIMED, "leases granted", 1)                                                                \
	X(TAKEN_OVER, "leases taken over", 1)                                                          \
	X(COMPLETER, "taken over by completers", 1)                                                    \
	X(OPEN_CLAIMED, "claims without a lease", 1)                                                   \
	X(OPEN_TAKEN_OVER, "taken over without a lease", 1)                                            \
	X(RESUMED, "gone on from a checkpoint", 1)                                                     \
	X(RENEWED, "heartbeats", 1)                                                                    \
	X(CHECKPOINT, "checkpoints", 1)                                                                \
	X(CHARGED, "charges at the provider", 1)                                                       \
	X(CHARGED_AGAIN, "charges asked for again", 1)                                                 \
	X(COMPLETED, "committed: completed", 1)                                                        \
	X(FAILED, "committed: failed for good", 1)                                                     \
	X(RELEASED, "released", 1)                                                                     \
	X(EVICTED, "evicted", 1)                                                                       \
	X(REPLAYED, "replayed", 1)                                                                     \
	X(IN_PROGRESS, "in_progress", 1)                                                               \
	X(MISMATCHED, "mismatched", 1)                                                                 \
	X(DIED, "workers died", 1)                                                                     \
	X(STALLED, "workers stalled", 1)                                                               \
	X(ZOMBIES, "zombies fenced out", 1)                                                            \
	X(LATE, "finished after the lease ran out", 1)                                                 \
	X(RECONNECTED, "workers reconnected", 1)                                                       \
	X(UNREAD, "COMMIT sent, answer not read", 1)                                                   \
	X(DOOMED, "COMMIT refused after IK410", 1)                                                     \
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
	X(PREY, "rows left to the reaper", 0)                                                          \
	X(REAPED, "rows reaped", 0)                                                                    \
	X(MAINTENANCE, "VACUUM, REINDEX and such", 0)

#endif /* STORM_TALLIES_H */
