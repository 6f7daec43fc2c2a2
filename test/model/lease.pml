/*
 * lease.pml
 *	 A model of the lease protocol of one key, which spin checks exhaustively.
 *
 * Three workers want the same operation. Any number of faults happen, at any
 * step: workers crash, stall, lose replies, and continue or not; leases end
 * early and the clock is set back; the row is deleted. test/model/run has spin
 * search every order of these steps.
 *
 *
 * What the model represents
 *
 * A Worker is a client and its backend, with one request for the key at a time.
 *	 Two concurrent retries of one client are two workers. Other keys have other
 *	 rows and other locks, and do not interact with this one. claim() includes
 *	 try_claim() and claim_abandoned(), complete() includes fail().
 *
 * A transaction takes the key's lock, reads the row, and commits, one step each.
 *	 It changes the row in its last step, because the change is invisible to
 *	 others before. A crash before that step leaves nothing; after it the row
 *	 stays, and only the reply is lost.
 *
 * FAULT marks where a worker can crash, be killed or cancelled, or lose its
 *	 connection. It continues with its token (at "cut"), restarts without any
 *	 state, or is gone permanently (at "lost"). The locks of a dead backend are
 *	 released some time later. Stalls need no mark: every worker can stop before
 *	 every step.
 *
 * lock is the key's lock, exclusive, held until the transaction ends. A worker
 *	 that waits for it in order to claim can time out (IK409) and retry.
 *
 * row, token, over and point are the key's row as committed; each read uses the
 *	 latest snapshot. A row "released" has no owner and no current token, but
 *	 keeps its recovery point. "over" is the comparison of the clock with the
 *	 lease's start and end. World changes it at any time in both directions,
 *	 because clocks are set.
 *
 * mine is the token of a worker; 0 is none. A new token comes from a sequence
 *	 and is greater than all before. renumber() closes the gaps and keeps the
 *	 order, so that a few numbers suffice for any number of claims.
 *
 * point is the recovery point: whether the first of two steps was committed
 *	 with checkpoint(). "from" is the recovery point that the claim returned. The
 *	 second step commits with complete(), which also does a missing first step.
 *
 * effect counts the commits of the business writes that belong to complete(),
 *	 step those that belong to checkpoint(), both since the row was last
 *	 deleted: a deleted key permits the operation to happen again.
 *
 * stable is the assumption that progress needs: at some time the faults stop,
 *	 and then leases last longer than the work of a live owner. A dead owner
 *	 loses its lease even then.
 *
 *
 * Checks
 *
 * ONCE	No business write is committed twice.
 * WHOLE	A worker that replays the outcome finds all business writes committed.
 * FENCED	Only the worker whose claim committed last can renew, checkpoint,
 *	 complete or release.
 * GROWING	The token of a claim is greater than those of all earlier claims.
 * progress	Once the model is stable, the request of every live worker ends with
 *	 the outcome, provided that every process that can always take a step
 *	 eventually does (weak fairness). A dead owner blocks no worker forever.
 *
 * CHECK selects among the first four, which hold while faults continue. With
 * CHECK=0 the model becomes stable, and progress can be checked.
 *
 *
 * Mutations that must be rejected
 *
 * BREAK names one of these, each of which breaks one rule. A check must detect
 * the broken rule.
 */
#define COMPLETE_ANY_TOKEN	  1		/* complete() ignores the row's token */
#define COMPLETE_BY_CLOCK	  2		/* complete() checks only that a lease is live */
#define RENEW_ANY_TOKEN		  4		/* renew() and checkpoint() take any token */
#define RELEASE_ANY_TOKEN	  8		/* release() takes any token */
#define TOKENS_START_AGAIN	  16	/* tokens restart at 1 once the row has no owner */
#define CLAIM_WITHOUT_LOCK	  32	/* a claim reads and writes without the lock */
#define RENEW_WITHOUT_LOCK	  64	/* so do renew(), checkpoint() and release() */
#define COMPLETE_WITHOUT_LOCK 128	/* so does complete() */
#define ONE_READ			  256	/* a claim does not read again under the lock */
#define EFFECT_FIRST		  512	/* the business writes commit before complete() */
#define EFFECT_LAST			  1024	/* the business writes commit after complete() */
#define IK410_CAUGHT		  2048	/* a transaction with a stale token commits */
#define RETRY_CHECKPOINT	  4096	/* a checkpoint() without reply is repeated */
#define NO_EXPIRY			  8192	/* leases never end */
#define WAIT_FOR_OWNER		  16384 /* a waiter reads again only if the owner ends */
#define LOCK_SURVIVES		  32768 /* the lock of a dead backend is never released */

/*
 * With VERSION_CHECK, all three WITHOUT_LOCK together must be accepted: a writer
 * waits for the previous writer of the row, and must then find the version that
 * it read, or still no row (the primary key); otherwise it fails with 40001. All
 * other checks use the lock without the version check. Either is sufficient to
 * prevent a repeated effect; the order of tokens needs the lock.
 */
#define VERSION_CHECK		  65536

#ifndef BREAK
#define BREAK 0
#endif
#define BROKEN(rule) (((BREAK) & (rule)) != 0)

#define ONCE	1
#define WHOLE	2
#define FENCED	4
#define GROWING 8
#ifndef CHECK
#define CHECK ONCE + WHOLE + FENCED + GROWING
#endif
#define CHOSEN(what)				(((CHECK) & (what)) != 0)
#define CHECKED(what, condition)	assert(!CHOSEN(what) || (condition))
#define NOTE(what, variable, value) variable = (CHOSEN(what) -> value : variable)

#ifndef WORKERS
#define WORKERS 3
#endif
#define ME	   (_pid + 1)
#define NONE 0
#define FAULT  (!stable)

/* The row of the key, as committed. */
mtype = { absent, released, held, done };
mtype row = absent;
byte token;
bool over;
bool point;

byte lock = NONE;
byte mine[4]; /* from 1 on, for at most three workers */
bool stable;
byte ended; /* workers that have ended */

/* State that only the checks use. */
byte owner; /* worker whose claim of the row committed last */
byte last;	/* the greatest committed token */
byte step;
byte effect;

/* For VERSION_CHECK: whether the version that a worker read is current. */
mtype = { nothing, no_row, this_version };
mtype saw[4] = nothing;

/* ----------------------------------------------------------------
 * Tokens
 * ----------------------------------------------------------------
 */

#define KNOWN(t) (mine[1] == t || mine[2] == t || mine[3] == t)
#define USED(t)	 (token == t || last == t || KNOWN(t))
#define LOWER(t) t = t - (t > number)

byte number; /* 0 outside draw() */

/* renumber makes the tokens 1, 2, 3 ... in the same order. */
inline renumber()
{
	number = 5;
	do
	:: number > 0 && USED(number) -> number--
	:: number > 0 && !USED(number) ->
		LOWER(token); LOWER(last); LOWER(mine[1]); LOWER(mine[2]); LOWER(mine[3]);
		number--
	:: number == 0 -> break
	od
}

/* draw gives the worker the next number of the sequence. */
inline draw()
{
	d_step {
		renumber();
		number = 1 + USED(1) + USED(2) + USED(3) + USED(4);
		mine[ME] = (BROKEN(TOKENS_START_AGAIN) -> token + 1 : number);
		number = 0
	}
}

/* ----------------------------------------------------------------
 * Parts of a transaction
 * ----------------------------------------------------------------
 */

/* TAKE_LOCK waits for the key's lock. */
#define TAKE_LOCK(without) \
	atomic { lock == NONE || BROKEN(without) -> lock = (BROKEN(without) -> lock : ME) }

/* note_version is part of each read of the row. */
inline note_version()
{
	saw[ME] = (!BROKEN(VERSION_CHECK) -> nothing : (row == absent -> no_row : this_version))
}

/* read_row checks that the worker owns the row; otherwise IK410. */
inline read_row(owns)
{
	atomic {
		if
		:: owns -> note_version()
		:: else -> goto fenced
		fi
	}
}

/* UNCHANGED is the condition of a write: the row is the version that was read. */
#define UNCHANGED \
	(!BROKEN(VERSION_CHECK) || saw[ME] == this_version || (saw[ME] == no_row && row == absent))

/* change commits a new version of the row, with an owner or none. */
#define OUTDATE(s) s = (s == this_version -> nothing : s)
inline change(new_row, new_token, new_point, new_owner)
{
	row = new_row; token = new_token; over = false; point = new_point;
	NOTE(FENCED, owner, new_owner);
	OUTDATE(saw[1]); OUTDATE(saw[2]); OUTDATE(saw[3])
}

/* business commits the missing writes, if they belong here. */
inline business(here)
{
	NOTE(ONCE + WHOLE, step, step + (here && !from));
	NOTE(ONCE + WHOLE, effect, effect + here);
	CHECKED(ONCE, step <= 1 && effect <= 1)
}

/* replay returns the stored outcome to the client. */
inline replay()
{
	CHECKED(WHOLE, step > 0 && effect > 0)
}

/* end_transaction releases all locks, or all but the key's. */
inline end_transaction(lock_stays)
{
	saw[ME] = nothing;
	lock = (lock == ME && !lock_stays -> NONE : lock)
}

/* ANSWER sends the client the reply to its commit. */
#define ANSWER(crashed) \
	if \
	:: true \
	:: FAULT -> goto crashed \
	fi

/* ----------------------------------------------------------------
 * A worker
 * ----------------------------------------------------------------
 */

active [WORKERS] proctype Worker()
{
	bool from;	  /* the recovery point of the claim */
	bool unknown; /* whether a checkpoint had no reply */

	/*
	 * A claim reads without the lock, and waits while a lease is live: until
	 * the owner ends it, until it expires, or until a timeout.
	 */
again:
	if
	:: atomic { row == done -> replay(); goto finished }
	:: atomic { row == held && !over ->
		row != held || !BROKEN(WAIT_FOR_OWNER);
		goto again }
	:: atomic { row != done && (row != held || over) -> from = BROKEN(ONE_READ) && point }
	fi;
	if
	:: TAKE_LOCK(CLAIM_WITHOUT_LOCK)
	:: lock != NONE -> from = false; goto again /* IK409 */
	:: FAULT -> goto lost
	fi;

	/* It reads again under the lock, and continues with or without a lease. */
	if
	:: atomic { row == done && !BROKEN(ONE_READ) ->
		replay();
		end_transaction(false);
		goto finished }
	:: atomic { row == held && !over && !BROKEN(ONE_READ) ->
		end_transaction(false);
		goto again }
	:: atomic { BROKEN(ONE_READ) || (row != done && (row != held || over)) ->
		note_version();
		from = (BROKEN(ONE_READ) -> from : point);
		if
		:: goto one_transaction
		:: draw()
		fi }
	fi;

	/* With a lease: without owner claimed, with an expired lease taken over. */
	if
	:: atomic { UNCHANGED ->
		CHECKED(GROWING, mine[ME] > last);
		NOTE(GROWING, last, mine[ME]);
		change(held, mine[ME], from, ME);
		end_transaction(false);
		ANSWER(lost) }
	:: FAULT || !UNCHANGED -> goto lost
	fi;

	/*
	 * Between transactions: the provider is called, or the worker stalls. In a
	 * stable model the work ends: no worker renews or releases forever.
	 */
working:
	if
	:: FAULT -> goto renew
	:: !from -> goto checkpoint
	:: atomic { true -> business(BROKEN(EFFECT_FIRST)); goto complete }
	:: FAULT -> goto release
	:: FAULT -> goto cut
	fi;

renew:
	if
	:: TAKE_LOCK(RENEW_WITHOUT_LOCK)
	:: FAULT -> goto cut
	fi;
	read_row(row == held && (token == mine[ME] || BROKEN(RENEW_ANY_TOKEN)));
	if
	:: atomic { UNCHANGED ->
		CHECKED(FENCED, owner == ME);
		change(held, token, point, owner);
		end_transaction(false) }
	:: FAULT || !UNCHANGED -> goto cut
	fi;
	goto working;

checkpoint:
	if
	:: TAKE_LOCK(RENEW_WITHOUT_LOCK)
	:: FAULT -> goto unsure
	fi;
	read_row(row == held && (token == mine[ME] || BROKEN(RENEW_ANY_TOKEN)));
	if
	:: atomic { UNCHANGED ->
		CHECKED(FENCED, owner == ME);
		NOTE(ONCE + WHOLE, step, step + 1);
		CHECKED(ONCE, step <= 1);
		change(held, token, true, owner);
		end_transaction(false);
		ANSWER(unsure) }
	:: FAULT || !UNCHANGED -> goto unsure
	fi;
	from = true;
	goto working;

complete:
	if
	:: TAKE_LOCK(COMPLETE_WITHOUT_LOCK)
	:: FAULT -> goto cut
	fi;
	read_row(BROKEN(COMPLETE_ANY_TOKEN) ||
		(row == held && (BROKEN(COMPLETE_BY_CLOCK) -> !over : token == mine[ME])));
	if
	:: atomic { UNCHANGED ->
		CHECKED(FENCED, owner == ME);
		business(!BROKEN(EFFECT_FIRST) && !BROKEN(EFFECT_LAST));
		change(done, 0, false, NONE);
		end_transaction(false);
		ANSWER(cut) }
	:: FAULT || !UNCHANGED -> goto cut
	fi;
	atomic { business(BROKEN(EFFECT_LAST)); goto finished };

release:
	if
	:: TAKE_LOCK(RENEW_WITHOUT_LOCK)
	:: FAULT -> goto cut
	fi;
	read_row(row == held && (token == mine[ME] || BROKEN(RELEASE_ANY_TOKEN)));
	if
	:: atomic { UNCHANGED ->
		CHECKED(FENCED, owner == ME);
		change(released, 0, point, NONE);
		end_transaction(false);
		ANSWER(cut) }
	:: FAULT || !UNCHANGED -> goto cut
	fi;
	goto lost;

	/*
	 * Without a lease: the lock is kept, and nothing is written before complete(),
	 * which stores the outcome or overwrites the row of the late owner.
	 */
one_transaction:
	if
	:: atomic { UNCHANGED ->
		business(true);
		change(done, 0, false, NONE);
		end_transaction(false);
		ANSWER(lost) }
	:: FAULT || !UNCHANGED -> goto lost
	fi;
	goto finished;

	/* IK410: the transaction is rolled back, and the client gets the error. */
fenced:
	atomic {
		business(BROKEN(IK410_CAUGHT));
		end_transaction(false);
		mine[ME] = 0; from = false; unknown = false;
		goto again
	};

	/*
	 * Without a reply to its checkpoint, a worker does not know whether the first
	 * step was committed, and its token would permit a second one. A new claim
	 * returns the recovery point, sooner if the worker releases its lease.
	 */
unsure:
	unknown = !BROKEN(RETRY_CHECKPOINT);
cut:
	atomic {
		end_transaction(BROKEN(LOCK_SURVIVES));
		if
		:: !unknown -> goto working
		:: unknown -> goto release
		:: goto lost
		fi
	};
lost:
	atomic {
		end_transaction(BROKEN(LOCK_SURVIVES));
		mine[ME] = 0; from = false; unknown = false;
		if
		:: goto again
		:: FAULT -> goto leave
		fi
	};

finished:
	atomic {
		mine[ME] = 0; from = false;
		if
		:: FAULT -> goto again /* the reply was lost, the client retries */
		:: goto leave
		fi
	};
leave:
	ended++
}

/* ----------------------------------------------------------------
 * Other events
 * ----------------------------------------------------------------
 */

active proctype World()
{
end:
	do
	/* Leases expire at any time first; in a stable model only those of the dead. */
	:: atomic { row == held && FAULT && !BROKEN(NO_EXPIRY) -> over = !over }
	:: atomic { row == held && !over && !KNOWN(token) && !BROKEN(NO_EXPIRY) -> over = true }

	/* forget() and the reaper; in one step, because the others can only wait. */
	:: atomic { row != absent && lock == NONE && FAULT ->
		change(absent, 0, false, NONE);
		step = 0; effect = 0 }

	:: atomic { (CHECK) == 0 && !stable -> stable = true }
	od
}

ltl progress { [] (stable -> <> (ended == WORKERS)) }
