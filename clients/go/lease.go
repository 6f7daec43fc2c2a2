package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrLeaseLost is the cause of a context whose lease has ended: another owner can be at work. A retry gets the result of that owner.
var ErrLeaseLost = leaseLost{}

type leaseLost struct{}

func (leaseLost) Error() string    { return "the lease is lost" }
func (leaseLost) SQLState() string { return "IK410" }

// Lease is an operation that is under a lease while the function of WithLease runs.
type Lease struct {
	Operation
	db         DB
	scope, key string
	duration   time.Duration
	writes     chan struct{} // held by the heartbeat, or by a transaction of the owner, which holds the key
	renewed    time.Time     // while writes is held
	done       *Operation
	checked    bool
}

// WithLease claims an operation under a lease, for work outside of a transaction, such as a call to a provider. If its outcome is
// stored, that is returned, and work is not called. Otherwise a heartbeat renews the lease at every third of it, and if the lease is lost, the context of
// work is cancelled with the cause ErrLeaseLost. work ends with Complete or Fail. If it returns an error, the operation is released, so that
// the next request continues it, after a takeover with the last checkpoint.
func WithLease(ctx context.Context, db DB, scope, key string, request any, options ClaimOptions, work func(context.Context, *Lease) error) (Operation, error) {
	if options.Lease == 0 {
		options.Lease = 30 * time.Second
	}
	lease := &Lease{db: db, scope: scope, key: key, duration: options.Lease, writes: make(chan struct{}, 1), renewed: time.Now()}
	err := db.Transaction(ctx, func(tx *Tx) (err error) {
		lease.Operation, err = tx.Claim(ctx, scope, key, request, options)
		return err
	})
	if err != nil || lease.Replayed {
		return lease.Operation, err
	}
	held, cancel := context.WithCancelCause(ctx)
	stopped := make(chan struct{})
	beating, stop := context.WithCancel(ctx)
	go func() {
		lease.beat(beating, cancel)
		close(stopped)
	}()
	owned := false
	defer func() {
		stop()
		<-stopped
		cancel(nil)
		if !owned {
			lease.giveUp(context.WithoutCancel(ctx)) // also after a panic
		}
	}()
	err = work(held, lease)
	if context.Cause(held) == error(ErrLeaseLost) && lease.done == nil {
		err = errors.Join(ErrLeaseLost, err)
	} else if err == nil && lease.done == nil {
		err = fmt.Errorf("the work of the lease %q ended without Complete or Fail", key)
	}
	if err != nil {
		return Operation{}, err
	}
	owned = true
	return *lease.done, nil
}

// beat renews the lease until its context ends, and cancels the work if the lease is lost.
func (l *Lease) beat(ctx context.Context, cancel context.CancelCauseFunc) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(l.duration / 3):
		}
		select {
		case l.writes <- struct{}{}:
		default: // a transaction of the owner holds the key, and with it the lease
			continue
		}
		started := time.Now()
		err := l.db.Transaction(ctx, func(tx *Tx) error { return l.renew(ctx, tx) })
		if err == nil {
			l.renewed = started
		}
		lost := l.done == nil && err != nil && ctx.Err() == nil && (SQLState(err) == "IK410" || time.Since(l.renewed) > l.duration)
		<-l.writes
		if lost {
			cancel(ErrLeaseLost)
			return
		}
	}
}

func (l *Lease) renew(ctx context.Context, tx *Tx) error {
	_, err := tx.Renew(ctx, l.scope, l.key, l.Token, l.duration)
	return err
}

// giveUp releases the operation after an error. A checkpoint keeps the request, with which a recovery job can continue.
func (l *Lease) giveUp(ctx context.Context) {
	l.db.Transaction(ctx, func(tx *Tx) error {
		if l.RecoveryPoint == "" && !l.checked {
			if err := tx.Checkpoint(ctx, l.scope, l.key, l.Token, "failed", nil); err != nil {
				return err
			}
		}
		return tx.Release(ctx, l.scope, l.key, l.Token)
	})
}

// Transaction calls work in a transaction that begins by renewing the lease: a former owner is refused before it writes. Call Complete or
// Fail in it with its Tx.
func (l *Lease) Transaction(ctx context.Context, work func(*Tx) error) error {
	select {
	case l.writes <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(l.duration):
		return errors.New("a transaction of the lease is open, and holds the key: inside of it, pass its Tx")
	}
	defer func() { <-l.writes }()
	started := time.Now()
	err := l.db.Transaction(ctx, func(tx *Tx) error {
		if err := l.renew(ctx, tx); err != nil {
			return err
		}
		return work(tx)
	})
	if err == nil {
		l.renewed = started
	} else {
		l.done = nil // what Complete has stored is rolled back
	}
	return err
}

func (l *Lease) in(ctx context.Context, tx *Tx, work func(*Tx) error) error {
	if tx == nil {
		return l.Transaction(ctx, work)
	}
	return work(tx)
}

func (l *Lease) finish(ctx context.Context, tx *Tx, name string, answer Answer) error {
	answer.Token, answer.OmitLarge = l.Token, true
	return l.in(ctx, tx, func(tx *Tx) error {
		stored, err := tx.finish(ctx, name, l.scope, l.key, answer)
		if err == nil {
			l.done = &Operation{Outcome: l.Outcome, Attempt: l.Attempt, Status: answer.Status, Response: stored, Failed: name == "fail"}
		}
		return err
	})
}

// Complete stores the success of the operation, in the transaction tx, or if it is nil in its own.
func (l *Lease) Complete(ctx context.Context, tx *Tx, answer Answer) error {
	return l.finish(ctx, tx, "complete", answer)
}

// Fail stores the final failure of the operation in the same way.
func (l *Lease) Fail(ctx context.Context, tx *Tx, answer Answer) error {
	return l.finish(ctx, tx, "fail", answer)
}

// Checkpoint stores a recovery point and a state for the next owner.
func (l *Lease) Checkpoint(ctx context.Context, point string, state any) error {
	l.checked = true
	return l.Transaction(ctx, func(tx *Tx) error { return tx.Checkpoint(ctx, l.scope, l.key, l.Token, point, state) })
}

// DeriveKey returns the key of one step, to pass to another service: the same for every owner.
func (l *Lease) DeriveKey(ctx context.Context, step string) (key string, err error) {
	err = l.db.Transaction(ctx, func(tx *Tx) (err error) {
		key, err = tx.DeriveKey(ctx, l.scope, l.key, step)
		return err
	})
	return
}
