package idempotency

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"time"
)

// DeadLetter wraps an error of a handler that no retry can cure: the event becomes a dead letter at once.
type DeadLetter struct{ Err error }

func (d DeadLetter) Error() string { return d.Err.Error() }
func (d DeadLetter) Unwrap() error { return d.Err }

// ConsumeOptions: 0 is 10 events, a wait of 5 seconds, and a lease of 30 seconds. UntilEmpty ends when no event is left.
type ConsumeOptions struct {
	MaxEvents   int
	Wait, Lease time.Duration
	UntilEmpty  bool
}

// consumer reads the events of a subscription.
type consumer struct {
	db           DB
	subscription string
	handler      func(context.Context, Event) error
	options      ConsumeOptions
}

// Consume calls handler for each event of a subscription, until ctx ends; it then returns nil. An event is handled at least once: call
// Once with its ID in the transaction of its effect, or pass the ID on as the idempotency key. If the handler returns an error, the
// event is retried later, and becomes a dead letter after the last attempt, or with DeadLetter. When ctx has ended, an event whose handler
// fails goes back, and counts no attempt. A heartbeat extends the lease of the batch; if the batch is lost, the context of the handler ends.
// Errors of the database that are not transient are returned.
func Consume(ctx context.Context, db DB, subscription string, handler func(context.Context, Event) error, options ConsumeOptions) error {
	if options.MaxEvents == 0 {
		options.MaxEvents = 10
	}
	if options.Wait == 0 && !options.UntilEmpty {
		options.Wait = 5 * time.Second
	}
	if options.Lease == 0 {
		options.Lease = 30 * time.Second
	}
	c := consumer{db, subscription, handler, options}
	for ctx.Err() == nil {
		batch, err := c.fetch(ctx)
		if err == nil && len(batch) > 0 {
			err = c.handle(ctx, batch)
		} else if err == nil && options.UntilEmpty {
			var more bool
			if err = c.call(ctx, &more, "idempotency.has_more($1::text)"); err == nil && !more {
				return nil
			}
		}
		if err != nil && ctx.Err() == nil && !errors.Is(err, errGone) {
			return err
		}
	}
	return nil
}

// call calls a function in its own transaction, which is retried; its first argument is the subscription.
func (c consumer) call(ctx context.Context, found any, call string, args ...any) error {
	return Retrying(ctx, math.MaxInt64, func() error {
		err := c.db.Transaction(ctx, func(tx *Tx) error { return tx.scan(ctx, found, call, append([]any{c.subscription}, args...)...) })
		if SQLState(err) == "IK408" {
			return errGone
		}
		return err
	})
}

// errGone is IK408, which no retry cures: another consumer has the batch.
var errGone = errors.New("the batch was redelivered")

// fetch returns the next batch, committed, so that the delivery counts even if this program dies.
func (c consumer) fetch(ctx context.Context) ([]Event, error) {
	var found string
	err := c.call(ctx, &found, `coalesce(json_agg(json_build_object('Batch', batch, 'Seq', seq, 'ID', id, 'Topic', topic, 'AggregateID', aggregate_id,
		'Type', type, 'Payload', payload, 'Headers', headers, 'Attempt', attempt)), '[]')::text
		FROM idempotency.fetch($1::text, $2::integer, $3::text::interval, $4::text::interval)`,
		c.options.MaxEvents, interval(c.options.Wait), interval(c.options.Lease))
	var rows []struct {
		Event
		Payload, Headers json.RawMessage
	}
	if err == nil {
		err = json.Unmarshal([]byte(found), &rows)
	}
	batch := []Event{}
	for _, row := range rows {
		row.Event.Payload, row.Event.Headers = row.Payload, row.Headers
		batch = append(batch, row.Event)
	}
	return batch, err
}

// handle handles a batch, with a heartbeat, and acknowledges it. When ctx ends, the rest of the batch goes back.
func (c consumer) handle(ctx context.Context, batch []Event) error {
	number := batch[0].Batch
	held, lose := context.WithCancelCause(ctx)
	defer lose(nil)
	// settle reports what was handled, retried after the end of ctx for a lease.
	settle := func(call string, args ...any) error {
		settling, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop()
		defer context.AfterFunc(ctx, func() { time.AfterFunc(c.options.Lease, stop) })()
		return c.call(settling, nil, call, append([]any{number}, args...)...)
	}
	beating, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	go func() {
		for beating.Err() == nil {
			select {
			case <-beating.Done():
			case <-time.After(c.options.Lease / 3):
				err := c.db.Transaction(beating, func(tx *Tx) error {
					return tx.scan(beating, nil, "idempotency.extend($1::text, $2::bigint, $3::text::interval)", c.subscription, number, interval(c.options.Lease))
				})
				if SQLState(err) == "IK408" {
					lose(errGone)
				}
			}
		}
	}()
	left, done := map[string]bool{}, []int64{}
	giveBack := func() error {
		list, _ := json.Marshal(done)
		return errors.Join(
			settle("idempotency.ack($1::text, $2::bigint, ARRAY(SELECT jsonb_array_elements_text($3::text::jsonb)::bigint))", string(list)),
			settle("idempotency.nack($1::text, $2::bigint, NULL)"))
	}
	for _, event := range batch {
		if left[event.AggregateID] {
			continue
		}
		if context.Cause(held) == errGone {
			return errGone
		}
		if ctx.Err() != nil {
			return giveBack()
		}
		fault := c.handler(held, event)
		if fault == nil {
			done = append(done, event.Seq)
			continue
		}
		var dead DeadLetter
		if ctx.Err() != nil && !errors.As(fault, &dead) {
			return giveBack()
		}
		message := strings.ToValidUTF8(strings.ReplaceAll(fault.Error(), "\x00", "\ufffd"), "\ufffd")
		err := settle("idempotency.nack($1::text, $2::bigint, $3::text::uuid, $4::text, dead => $5::boolean)", event.ID, message, errors.As(fault, &dead))
		if err != nil {
			return err
		}
		left[event.AggregateID] = event.AggregateID != "" // its later events have left the batch
	}
	return settle("idempotency.ack($1::text, $2::bigint)")
}
