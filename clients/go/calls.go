// Package idempotency calls the PostgreSQL extension idempotency, or its portable edition, through
// database/sql, or through pgx with the package pgxadapter: retries have their effect exactly once.
package idempotency

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Row is the one row of a statement: *sql.Row, or pgx.Row.
type Row interface{ Scan(dest ...any) error }

// DB begins transactions. Transaction calls work in one, commits, and rolls back after an error or a panic.
type DB interface {
	Transaction(ctx context.Context, work func(*Tx) error) error
}

// Tx makes the calls in one transaction. Native is the driver's transaction: write through it.
type Tx struct {
	Native any
	query  func(ctx context.Context, sql string, args ...any) Row
	exec   func(ctx context.Context, sql string) error
}

// NewTx returns a Tx for an adapter, such as pgxadapter: the driver's transaction, and its functions.
func NewTx(native any, query func(ctx context.Context, sql string, args ...any) Row, exec func(ctx context.Context, sql string) error) *Tx {
	return &Tx{native, query, exec}
}

// WithSQL returns the calls in a transaction of database/sql that your code has begun.
func WithSQL(tx *sql.Tx) *Tx {
	query := func(ctx context.Context, sql string, args ...any) Row { return tx.QueryRowContext(ctx, sql, args...) }
	exec := func(ctx context.Context, sql string) error { _, err := tx.ExecContext(ctx, sql); return err }
	return NewTx(tx, query, exec)
}

type sqlDB struct{ db *sql.DB }

// SQL returns the DB of database/sql, with the driver of pgx or lib/pq. Native of its transactions is a *sql.Tx.
func SQL(db *sql.DB) DB { return sqlDB{db} }

func (d sqlDB) Transaction(ctx context.Context, work func(*Tx) error) error {
	tx, err := d.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // without effect after the commit
	if err := work(WithSQL(tx)); err != nil {
		return err
	}
	return tx.Commit()
}

// Operation is the result of a claim. State, Headers and Response are stored byte for byte.
type Operation struct {
	Outcome       string
	Replayed      bool
	Token         int64 // 0 without a lease
	Attempt       int
	RecoveryPoint string
	State         json.RawMessage
	Status        int
	Headers       json.RawMessage
	Response      json.RawMessage
	Failed        bool
	RetryAfter    time.Duration
}

// ClaimOptions are the durations of a claim; 0 is the default of the database, and a negative Wait does not wait.
type ClaimOptions struct{ Lease, Wait, Retention time.Duration }

// Answer is what complete and fail store. Status 0 is 200. Token is that of the lease, or 0.
type Answer struct {
	Response, Headers any
	Status            int
	Token             int64
	OmitLarge         bool // store an answer that is too large without its response
}

// encode returns the JSON text of a value, nil for nil. A json.RawMessage is passed byte for byte.
func encode(value any) (*string, error) {
	if raw, ok := value.(json.RawMessage); ok || value == nil {
		return text(string(raw)), nil
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(value)
	return text(strings.TrimSuffix(out.String(), "\n")), err
}

// text returns NULL for an empty string.
func text(value string) *string {
	if value == "" {
		return nil
	}
	return &value
}

// interval returns the text of a duration, NULL for 0.
func interval(value time.Duration) *string {
	if value == 0 {
		return nil
	}
	return text(fmt.Sprintf("%d microseconds", value.Microseconds()))
}

// number returns NULL for 0.
func number[N int | int64](value N) *N {
	if value == 0 {
		return nil
	}
	return &value
}

// value returns what a nullable column points to, or zero.
func value[T any](pointer *T) (found T) {
	if pointer != nil {
		found = *pointer
	}
	return
}

// raw returns JSON, nil for NULL.
func raw(text *string) json.RawMessage {
	if text == nil {
		return nil
	}
	return json.RawMessage(*text)
}

func (t *Tx) claim(ctx context.Context, name, scope, key string, request any, options ClaimOptions) (op Operation, err error) {
	body, err := encode(request)
	if err != nil {
		return op, err
	}
	wait := interval(max(options.Wait, 0))
	if options.Wait < 0 {
		wait = text("0")
	}
	var token *int64
	var attempt, status, after *int
	var point, state, headers, response *string
	err = t.query(ctx, `SELECT outcome::text, replayed, token, attempt, recovery_point, state::text, status, headers::text, response::text,
		failed, retry_after FROM idempotency.`+name+`($1::text, $2::text, $3::text, lease => $4::text::interval, wait => $5::text::interval,
		retention => $6::text::interval)`, scope, key, body, interval(options.Lease), wait, interval(options.Retention)).Scan(
		&op.Outcome, &op.Replayed, &token, &attempt, &point, &state, &status, &headers, &response, &op.Failed, &after)
	op.Token, op.Attempt, op.RecoveryPoint, op.Status = value(token), value(attempt), value(point), value(status)
	op.State, op.Headers, op.Response = raw(state), raw(headers), raw(response)
	op.RetryAfter = time.Duration(value(after)) * time.Second
	return op, err
}

// Claim claims an operation, or returns its stored outcome. It fails with IK409 while another owner is at work, and with IK422 if
// the key was used with another request. request is any value that encoding/json encodes; nil compares nothing.
func (t *Tx) Claim(ctx context.Context, scope, key string, request any, options ClaimOptions) (Operation, error) {
	return t.claim(ctx, "claim", scope, key, request, options)
}

// TryClaim is Claim that returns the outcomes in_progress and mismatched instead of an error.
func (t *Tx) TryClaim(ctx context.Context, scope, key string, request any, options ClaimOptions) (Operation, error) {
	return t.claim(ctx, "try_claim", scope, key, request, options)
}

func (t *Tx) finish(ctx context.Context, name, scope, key string, answer Answer) (json.RawMessage, error) {
	body, err := encode(answer.Response)
	headers, fault := encode(answer.Headers)
	if err = errors.Join(err, fault); err != nil {
		return nil, err
	}
	var stored *string
	err = t.query(ctx, `SELECT idempotency.`+name+`(scope => $1::text, key => $2::text, response => $3::text, status => $4::integer,
		headers => $5::text, token => $6::bigint, omit_large => $7::boolean)::text`,
		scope, key, body, number(answer.Status), headers, number(answer.Token), answer.OmitLarge).Scan(&stored)
	return raw(stored), err
}

// Complete stores the success of an operation, and returns its response as a retry gets it.
func (t *Tx) Complete(ctx context.Context, scope, key string, answer Answer) (json.RawMessage, error) {
	return t.finish(ctx, "complete", scope, key, answer)
}

// Fail stores the final failure of an operation, which has a Status. It undoes nothing: use a Savepoint.
func (t *Tx) Fail(ctx context.Context, scope, key string, answer Answer) (json.RawMessage, error) {
	return t.finish(ctx, "fail", scope, key, answer)
}

// Savepoint calls work, and undoes its writes if it returns an error.
func (t *Tx) Savepoint(ctx context.Context, work func() error) error {
	if err := t.exec(ctx, "SAVEPOINT idempotency"); err != nil {
		return err
	}
	fault, end := work(), "RELEASE SAVEPOINT idempotency"
	if fault != nil {
		end = "ROLLBACK TO SAVEPOINT idempotency; " + end // an outer Savepoint has the same name
	}
	if err := t.exec(ctx, end); err != nil {
		return errors.Join(err, fault) // a lost connection
	}
	return fault
}

// scan calls a function whose result is one value, and reads it into found, if it is not nil.
func (t *Tx) scan(ctx context.Context, found any, call string, args ...any) error {
	if found == nil {
		call, found = "("+call+") IS NULL", new(bool)
	}
	return t.query(ctx, "SELECT "+call, args...).Scan(found)
}

// Release gives a claim up, so that the next request runs the operation. token is that of the lease, or 0.
func (t *Tx) Release(ctx context.Context, scope, key string, token int64) error {
	return t.scan(ctx, nil, "idempotency.release($1::text, $2::text, $3::bigint)", scope, key, number(token))
}

// Renew restarts a lease, and returns its new end.
func (t *Tx) Renew(ctx context.Context, scope, key string, token int64, lease time.Duration) (end time.Time, err error) {
	err = t.scan(ctx, &end, "idempotency.renew($1::text, $2::text, $3::bigint, $4::text::interval)", scope, key, token, interval(lease))
	return
}

// Checkpoint stores a recovery point and a state for the next owner.
func (t *Tx) Checkpoint(ctx context.Context, scope, key string, token int64, point string, state any) error {
	document, err := encode(state)
	if err != nil {
		return err
	}
	return t.scan(ctx, nil, "idempotency.checkpoint($1::text, $2::text, $3::bigint, $4::text, $5::text)", scope, key, token, point, document)
}

// DeriveKey returns the key of one step of an operation, to pass to another service.
func (t *Tx) DeriveKey(ctx context.Context, scope, key, step string) (derived string, err error) {
	err = t.scan(ctx, &derived, "idempotency.derive_key($1::text, $2::text, $3::text)::text", scope, key, step)
	return
}

// Once stores the key of a message, and returns whether it is new. Write its effect in the same transaction.
func (t *Tx) Once(ctx context.Context, scope, key string, retention time.Duration) (fresh bool, err error) {
	err = t.scan(ctx, &fresh, "idempotency.once($1::text, $2::text, $3::text::interval)", scope, key, interval(retention))
	return
}

// OnceMany stores keys, and returns the new ones.
func (t *Tx) OnceMany(ctx context.Context, scope string, keys []string, retention time.Duration) (fresh []string, err error) {
	list, err := json.Marshal(append([]string{}, keys...))
	if err != nil {
		return nil, err
	}
	var found string
	err = t.scan(ctx, &found, `coalesce(json_agg(key), '[]')::text FROM idempotency.once_many($1::text,
		ARRAY(SELECT jsonb_array_elements_text($2::text::jsonb)), $3::text::interval) AS key`, scope, string(list), interval(retention))
	if err == nil {
		err = json.Unmarshal([]byte(found), &fresh)
	}
	return
}

// Event is what Publish publishes, and a consumer gets.
type Event struct {
	ID          string // set by the database if it is empty
	Topic       string
	AggregateID string
	Type        string
	Payload     any // of an event that a consumer gets, a json.RawMessage
	Headers     any
	DeliverAt   time.Time // no earlier, if it is set
	Batch, Seq  int64
	Attempt     int
}

// Publish publishes an event in this transaction, and returns its id.
func (t *Tx) Publish(ctx context.Context, event Event) (id string, err error) {
	payload, err := encode(event.Payload)
	headers, fault := encode(event.Headers)
	if err = errors.Join(err, fault); err != nil {
		return "", err
	}
	var at *string
	if !event.DeliverAt.IsZero() {
		at = text(event.DeliverAt.UTC().Format(time.RFC3339Nano))
	}
	err = t.scan(ctx, &id, `idempotency.publish(topic => $1::text, payload => $2::text, aggregate_id => $3::text, type => $4::text,
		headers => $5::text, event_id => $6::text::uuid, deliver_at => $7::text::timestamptz)::text`,
		event.Topic, payload, text(event.AggregateID), text(event.Type), headers, text(event.ID), at)
	return
}
