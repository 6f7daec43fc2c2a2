/*-------------------------------------------------------------------------
 *
 * tallies.h
 *	  The counters of this driver.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_TALLIES_H
#define STRESS_TALLIES_H

/* Runs with fewer operations or clients need not reach all minimums. */
#define FULL_RUN 5000
#define FULL_CLIENTS 4

/* All counters: name, text, and the minimum of a full run. */
#define TALLY_LIST(X)                                                                              \
	X(ATTEMPTS, "attempts", 1)                                                                     \
	X(CLAIMED, "claims granted", 1)                                                                \
	X(EXPIRED, "expired records planted", 1)                                                       \
	X(COMPLETED, "committed: completed", 1)                                                        \
	X(FAILED, "committed: failed", 1)                                                              \
	X(ONCE_NEW, "committed: once, new", 1)                                                         \
	X(RELEASED, "committed: released", 1)                                                          \
	X(UNREAD, "COMMIT sent, reply not read", 1)                                                    \
	X(REPLAYED, "replayed", 1)                                                                     \
	X(ONCE_SEEN, "once, seen before", 1)                                                           \
	X(IN_PROGRESS, "in_progress", 1)                                                               \
	X(MISMATCHED, "mismatched", 1)                                                                 \
	X(ROLLED_BACK, "rolled back by the client", 1)                                                 \
	X(SAVEPOINT, "rolled back to a savepoint", 1)                                                  \
	X(PREPARED, "prepared, or unknown", 1)                                                         \
	X(PREPARED_COMMITTED, "committed, prepared", 1)                                                \
	X(PREPARED_ROLLED_BACK, "rolled back, prepared", 1)                                            \
	X(IK403, "IK403 write without a claim", 1)                                                     \
	X(IK409, "IK409 in progress", 1)                                                               \
	X(IK412, "IK412 no claim", 1)                                                                  \
	X(IK422, "IK422 another request", 1)                                                           \
	X(IK428, "IK428 not completed", 1)                                                             \
	X(SERIALIZATION, "40001 serialization failure", 1)                                             \
	X(DEADLOCK, "40P01 deadlock", 1)                                                               \
	X(CANCELLED, "57014 cancelled", 1)                                                             \
	X(LOCK_TIMEOUT, "55P03 lock_timeout", 1)                                                       \
	X(TRANSIENT, "ST001 transient failure", 1)                                                     \
	X(CANCELS, "cancels sent", 1)                                                                  \
	X(DROPPED, "connections dropped", 1)                                                           \
	X(TERMINATIONS, "terminations sent", 1)                                                        \
	X(TERMINATED, "connections terminated", 1)                                                     \
	X(MAINTENANCE, "VACUUM, REINDEX and such", 0)

#endif /* STRESS_TALLIES_H */
