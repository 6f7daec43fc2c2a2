/*
 * lease.pml
 *	  A model of the lease protocol of one key, which spin checks exhaustively.
 *
 * Three workers want the same operation done.  Any number of faults happen, at
 * any step: workers crash, stall, lose answers, come back or do not; leases end
 * early and the clock goes back; the row is forgotten.  test/model/run has spin
 * look at every order of events that this allows.
 *
 *
 * What stands for what
 *
 * A Worker is a client and its backend, with one request for the key at a time.
 *	  Two retries of one client, the first of them still on its way, are two
 *	  workers.  Other keys have other rows and other locks, and do not meet this
 *	  one.  claim() stands for try_claim() and claim_abandoned() too, complete()
 *	  for fail().
 *
 * A transaction takes the key's lock, looks at the row, and commits, one step
 *	  each.  It changes the row in its last step, since nobody sees it before.  A
 *	  crash before that leaves nothing; after it the row stays, and only the
 *	  answer is lost.
 *
 * FAULT marks where a worker may crash, be killed or cancelled, or be cut off.
 *	  It comes back with its token and goes on where it was (at "cut"), or has
 *	  forgotten all and begins again, or is gone for good (at "lost").  The locks
 *	  of a dead backend go some time after it.  To stall needs no mark: every
 *	  worker may stand still before every step.
 *
 * lock is the key's lock (keylock.c), exclusive, and kept until the transaction
 *	  ends.  Who waits for it in order to claim may give up (IK409) and retry.
 *
 * row, token, over and point are the key's row as committed (store.c); a look
 *	  is one under the latest snapshot.  A row "released" has no owner, and no
 *	  token is the current one, but it keeps its recovery point.  "over" is what
 *	  a look finds when it compares the clock with the lease's start and end.
 *	  World changes it at any moment and both ways, since clocks are set.
 *
 * mine is the token that a worker was given; 0 is none.  A new one comes from a
 *	  sequence, and is greater than any before.  renumber() keeps their order and
 *	  closes the gaps, so that a handful of numbers does for any number of claims.
 *
 * point is the recovery point: has the first of two steps been committed, with
 *	  checkpoint()?  "from" is what the owner was told of it at its claim.  The
 *	  second step commits with complete(), which also makes up for the first.
 *
 * effect counts the commits of the business writes that belong to complete(),
 *	  step those that belong to checkpoint(), both since the row was last
 *	  forgotten: to forget is to let the operation happen again.
 *
 * calm is the assumption that an end needs: at some moment the faults stop, and
 *	  from then on leases outlast the work of an owner who is there.  One who is
 *	  not there loses its lease even then.
 *
 *
 * What is checked
 *
 * ONCE		No business write is committed twice.
 * WHOLE	Who is replayed the outcome finds all business writes committed.
 * FENCED	Nobody renews, checkpoints, completes or releases but the worker whose
 *			claim was the last to commit.
 * GROWING	The token of a claim is greater than those of all claims before.
 * served	Once it is calm, the request of every worker that is still there ends
 *			with the outcome, if every process that can always go on does at last
 *			(weak fairness).  Nobody is blocked for ever by a dead owner.
 *
 * CHECK chooses among the first four, which hold with faults that never stop.
 * With CHECK=0 it becomes calm, and served can be checked.
 *
 *
 * What must be rejected
 *
 * BREAK names one of these, each of which breaks one rule.  A check that does
 * not notice is no check.
 */
#define COMPLETE_ANY_TOKEN	  1		/* complete() does not look at the row's token */
#define COMPLETE_BY_CLOCK	  2		/* but at the lease: is it live? */
#define RENEW_ANY_TOKEN		  4		/* renew() and checkpoint() take any token */
#define RELEASE_ANY_TOKEN	  8		/* release() takes any token */
#define TOKENS_START_AGAIN	  16	/* tokens count from 1 once nobody owns the row */
#define CLAIM_WITHOUT_LOCK	  32	/* a claim looks and writes without the lock */
#define RENEW_WITHOUT_LOCK	  64	/* so do renew(), checkpoint() and release() */
#define COMPLETE_WITHOUT_LOCK 128	/* so does complete() */
#define ONE_LOOK			  256	/* a claim does not look again under the lock */
#define EFFECT_FIRST		  512	/* the business writes commit before complete() */
#define EFFECT_LAST			  1024	/* the business writes commit after complete() */
#define IK410_CAUGHT		  2048	/* a transaction with a stale token commits */
#define RETRY_CHECKPOINT	  4096	/* no answer to checkpoint(): the same once more */
#define NO_EXPIRY			  8192	/* leases never end */
#define WAIT_FOR_OWNER		  16384 /* a waiter looks again only if the owner ends */
#define LOCK_SURVIVES		  32768 /* the lock of a dead backend stays */

/*
 * With this one, all three WITHOUT_LOCK together must be accepted: who writes
 * the row waits for whoever has written it, and must then find the version that
 * he saw, or still no row (the primary key); if not, it is 40001.  In all other
 * checks the lock has to do without that.  So either is enough to keep an
 * effect from happening twice; the order of the tokens needs the lock.
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
#define NOBODY 0
#define FAULT  (!calm)

/* The row of the key, as committed. */
mtype = { absent, released, held, done };
mtype row = absent;
byte token;
bool over;
bool point;

byte lock = NOBODY;
byte mine[4]; /* from 1 on, for at most three workers */
bool calm;
byte ended; /* workers that will not come again */

/* What the code does not know, and the checks do. */
byte owner; /* whose claim of the held row was the last to commit */
byte last;	/* the greatest token that was ever committed */
byte step;
byte effect;

/* For VERSION_CHECK: is what a worker saw still there? */
mtype = { nothing, no_row, this_version };
mtype saw[4] = nothing;

/* ----------------------------------------------------------------
 * Tokens
 * ----------------------------------------------------------------
 */

#define KNOWN(t) (mine[1] == t || mine[2] == t || mine[3] == t)
#define USED(t)	 (token == t || last == t || KNOWN(t))
#define LOWER(t) t = t - (t > number)

byte number; /* 0 but within draw() */

/* renumber keeps the order of all tokens, and makes them 1, 2, 3 ... */
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
	atomic { lock == NOBODY || BROKEN(without) -> lock = (BROKEN(without) -> lock : ME) }

/* note_version is part of a look at the row. */
inline note_version()
{
	saw[ME] = (!BROKEN(VERSION_CHECK) -> nothing : (row == absent -> no_row : this_version))
}

/* look finds out whether the worker owns the row; if not, it is IK410. */
inline look(owns)
{
	atomic {
		if
		:: owns -> note_version()
		:: else -> goto fenced
		fi
	}
}

/* UNCHANGED is what a write has to find, when nobody else writes. */
#define UNCHANGED \
	(!BROKEN(VERSION_CHECK) || saw[ME] == this_version || (saw[ME] == no_row && row == absent))

/* change commits a new version of the row, for an owner or none. */
#define OUTDATE(s) s = (s == this_version -> nothing : s)
inline change(new_row, new_token, new_point, new_owner)
{
	row = new_row; token = new_token; over = false; point = new_point;
	NOTE(FENCED, owner, new_owner);
	OUTDATE(saw[1]); OUTDATE(saw[2]); OUTDATE(saw[3])
}

/* business commits the writes that are still to be made, if this is the place. */
inline business(here)
{
	NOTE(ONCE + WHOLE, step, step + (here && !from));
	NOTE(ONCE + WHOLE, effect, effect + here);
	CHECKED(ONCE, step <= 1 && effect <= 1)
}

/* replay gives the client the stored outcome. */
inline replay()
{
	CHECKED(WHOLE, step > 0 && effect > 0)
}

/* end_transaction lets go of all locks, or all but the key's. */
inline end_transaction(lock_stays)
{
	saw[ME] = nothing;
	lock = (lock == ME && !lock_stays -> NOBODY : lock)
}

/* ANSWER tells the client that the transaction has committed. */
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
	bool from;	  /* the recovery point from which it goes on */
	bool unknown; /* has a checkpoint had no answer? */

	/*
	 * A claim looks without the lock, and waits while a lease is live: until
	 * the owner has ended it, or until it is over, or just for some time.
	 */
again:
	if
	:: atomic { row == done -> replay(); goto served }
	:: atomic { row == held && !over ->
		row != held || !BROKEN(WAIT_FOR_OWNER);
		goto again }
	:: atomic { row != done && (row != held || over) -> from = BROKEN(ONE_LOOK) && point }
	fi;
	if
	:: TAKE_LOCK(CLAIM_WITHOUT_LOCK)
	:: lock != NOBODY -> from = false; goto again /* IK409 */
	:: FAULT -> goto lost
	fi;

	/* It looks again under the lock, and goes on with a lease or without one. */
	if
	:: atomic { row == done && !BROKEN(ONE_LOOK) ->
		replay();
		end_transaction(false);
		goto served }
	:: atomic { row == held && !over && !BROKEN(ONE_LOOK) ->
		end_transaction(false);
		goto again }
	:: atomic { BROKEN(ONE_LOOK) || (row != done && (row != held || over)) ->
		note_version();
		from = (BROKEN(ONE_LOOK) -> from : point);
		if
		:: goto one_transaction
		:: draw()
		fi }
	fi;

	/* With one: no owner means claimed, an owner whose lease is over taken over. */
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
	 * Between transactions: the provider is called, or the worker stalls.  When
	 * it is calm, the work comes to its end: nobody renews or gives up for ever.
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
	look(row == held && (token == mine[ME] || BROKEN(RENEW_ANY_TOKEN)));
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
	look(row == held && (token == mine[ME] || BROKEN(RENEW_ANY_TOKEN)));
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
	look(BROKEN(COMPLETE_ANY_TOKEN) ||
		(row == held && (BROKEN(COMPLETE_BY_CLOCK) -> !over : token == mine[ME])));
	if
	:: atomic { UNCHANGED ->
		CHECKED(FENCED, owner == ME);
		business(!BROKEN(EFFECT_FIRST) && !BROKEN(EFFECT_LAST));
		change(done, 0, false, NOBODY);
		end_transaction(false);
		ANSWER(cut) }
	:: FAULT || !UNCHANGED -> goto cut
	fi;
	atomic { business(BROKEN(EFFECT_LAST)); goto served };

release:
	if
	:: TAKE_LOCK(RENEW_WITHOUT_LOCK)
	:: FAULT -> goto cut
	fi;
	look(row == held && (token == mine[ME] || BROKEN(RELEASE_ANY_TOKEN)));
	if
	:: atomic { UNCHANGED ->
		CHECKED(FENCED, owner == ME);
		change(released, 0, point, NOBODY);
		end_transaction(false);
		ANSWER(cut) }
	:: FAULT || !UNCHANGED -> goto cut
	fi;
	goto lost;

	/*
	 * Without a lease: the lock is kept, and nothing written before complete(),
	 * which stores the outcome or overwrites the row of the owner that is late.
	 */
one_transaction:
	if
	:: atomic { UNCHANGED ->
		business(true);
		change(done, 0, false, NOBODY);
		end_transaction(false);
		ANSWER(lost) }
	:: FAULT || !UNCHANGED -> goto lost
	fi;
	goto served;

	/* IK410: nothing of the transaction remains.  The client is told. */
fenced:
	atomic {
		business(BROKEN(IK410_CAUGHT));
		end_transaction(false);
		mine[ME] = 0; from = false; unknown = false;
		goto again
	};

	/*
	 * Who gets no answer to a checkpoint does not know whether the first step was
	 * made, and its token would let it make the step again.  A claim can tell,
	 * sooner if it gives up its lease.
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

served:
	atomic {
		mine[ME] = 0; from = false;
		if
		:: FAULT -> goto again /* the answer was lost, the client retries */
		:: goto leave
		fi
	};
leave:
	ended++
}

/* ----------------------------------------------------------------
 * What else happens
 * ----------------------------------------------------------------
 */

active proctype World()
{
end:
	do
	/* Time does what it likes at first; in the end it is against the dead only. */
	:: atomic { row == held && FAULT && !BROKEN(NO_EXPIRY) -> over = !over }
	:: atomic { row == held && !over && !KNOWN(token) && !BROKEN(NO_EXPIRY) -> over = true }

	/* forget(), and the reaper; in one step, since the others can but wait. */
	:: atomic { row != absent && lock == NOBODY && FAULT ->
		change(absent, 0, false, NOBODY);
		step = 0; effect = 0 }

	:: atomic { (CHECK) == 0 && !calm -> calm = true }
	od
}

ltl served { [] (calm -> <> (ended == WORKERS)) }
