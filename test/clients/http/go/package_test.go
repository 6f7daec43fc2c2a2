// Tests of what the cases of conformance.json do not reach. test/clients/pack_go runs them with the database of the services.
package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	idempotency "example.org/pg-idempotency"
	"example.org/pg-idempotency/pgxadapter"
)

var background = context.Background()

// each runs a test with each driver; the name of the test is its scope and its topic.
func each(t *testing.T, test func(t *testing.T, s service, name string)) {
	for driver, use := range map[string]func(string) client{"pgx": usePgx, "sql": useSQL} {
		t.Run(driver, func(t *testing.T) { test(t, service{use(os.Getenv("PGHOST"))}, t.Name()) })
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// is fails unless both values are equal.
func is(t *testing.T, found, expected any) {
	t.Helper()
	if !reflect.DeepEqual(found, expected) {
		t.Fatalf("expected %v, found %v", expected, found)
	}
}

// subscribed makes a subscription of that name to the topic of that name, and publishes some events.
func subscribed(t *testing.T, s service, name string, events int) {
	t.Helper()
	if os.Getenv("EDITION") == "portable" {
		t.Skip("the role of the clients is no consumer there")
	}
	must(t, s.elsewhere(background, "SELECT idempotency.subscribe($1::text, ARRAY[$1::text], retry_delay => '0')::text", name).Scan(new(string)))
	must(t, s.db.Transaction(background, func(tx *idempotency.Tx) (err error) {
		for range events {
			_, err = tx.Publish(background, idempotency.Event{Topic: name, Payload: 1})
		}
		return err
	}))
}

// rest returns the attempts of the events that are left.
func rest(t *testing.T, s service, name string) (attempts []int) {
	t.Helper()
	must(t, idempotency.Consume(background, s.db, name, func(_ context.Context, event idempotency.Event) error {
		attempts = append(attempts, event.Attempt)
		return nil
	}, idempotency.ConsumeOptions{UntilEmpty: true}))
	return
}

func TestStripPrefix(t *testing.T) {
	each(t, func(t *testing.T, s service, name string) {
		scope := func(*http.Request) (string, error) { return name, nil }
		handler := idempotency.Handle(idempotency.HTTPOptions{DB: s.db, Scope: scope}, s.charge)
		mux := http.NewServeMux()
		mux.Handle("/v1/", http.StripPrefix("/v1", handler))
		mux.Handle("/v2/", http.StripPrefix("/v2", handler))
		post := func(path string) (int, string) {
			request, answer := httptest.NewRequest("POST", path, strings.NewReader(`{"Customer": "ann", "Amount": 1}`)), httptest.NewRecorder()
			request.Header.Set("Idempotency-Key", `"k"`)
			request.Header.Set("Content-Type", "application/json")
			mux.ServeHTTP(answer, request)
			return answer.Code, answer.Header().Get("Idempotent-Replayed")
		}
		for _, asked := range []struct {
			path     string
			status   int
			replayed string
		}{{"/v1/charges", 201, ""}, {"/v1/charges", 201, "true"}, {"/v2/charges", 422, ""}} {
			status, replayed := post(asked.path)
			is(t, []any{status, replayed}, []any{asked.status, asked.replayed})
		}
	})
}

func TestSavepointInHandler(t *testing.T) {
	each(t, func(t *testing.T, s service, name string) {
		scope := func(*http.Request) (string, error) { return name, nil }
		handler := idempotency.Handle(idempotency.HTTPOptions{DB: s.db, Scope: scope}, func(w http.ResponseWriter, r *http.Request, tx *idempotency.Tx) error {
			_, err := s.insert(r.Context(), tx, name, 1)
			declined := errors.New("declined")
			if fault := tx.Savepoint(r.Context(), func() error { return declined }); fault != declined {
				return errors.Join(err, fault)
			}
			w.WriteHeader(http.StatusPaymentRequired)
			return err
		})
		request, answer := httptest.NewRequest("POST", "/", nil), httptest.NewRecorder()
		request.Header.Set("Idempotency-Key", `"k"`)
		handler.ServeHTTP(answer, request)
		is(t, answer.Code, http.StatusPaymentRequired)
		charges := -1
		must(t, s.elsewhere(background, "SELECT count(*) FROM charge WHERE customer = $1", name).Scan(&charges))
		is(t, charges, 0)
	})
}

// A transaction of the lease inside of another one would wait for itself.
func TestLeaseInItsTransaction(t *testing.T) {
	each(t, func(t *testing.T, s service, name string) {
		_, err := idempotency.WithLease(background, s.db, name, "k", nil, idempotency.ClaimOptions{Lease: time.Second}, func(ctx context.Context, lease *idempotency.Lease) error {
			return lease.Transaction(ctx, func(*idempotency.Tx) error { return lease.Complete(ctx, nil, idempotency.Answer{}) })
		})
		if err == nil || !strings.Contains(err.Error(), "pass its Tx") {
			t.Fatal(err)
		}
	})
}

func TestPgxConnection(t *testing.T) {
	connection, err := pgx.Connect(background, "host="+os.Getenv("PGHOST"))
	must(t, err)
	defer connection.Close(background)
	refused := func(beginner pgxadapter.Beginner) {
		defer func() {
			if recover() == nil {
				t.Fatalf("%T is no pool", beginner)
			}
		}()
		pgxadapter.New(beginner)
	}
	refused(connection)
	for range 2 { // a transaction of the application, which it rolls back
		tx, err := connection.Begin(background)
		must(t, err)
		refused(tx)
		fresh, err := pgxadapter.With(tx).Once(background, t.Name(), "k", 0)
		must(t, err)
		is(t, fresh, true)
		must(t, tx.Rollback(background))
	}
}

func TestLeaseAfterContext(t *testing.T) {
	each(t, func(t *testing.T, s service, name string) {
		options := idempotency.ClaimOptions{Lease: time.Second, Wait: -1}
		ctx, cancel := context.WithCancel(background)
		_, err := idempotency.WithLease(ctx, s.db, name, "k", nil, options, func(ctx context.Context, _ *idempotency.Lease) error {
			cancel()
			time.Sleep(options.Lease / 2) // the time of a heartbeat
			return ctx.Err()
		})
		is(t, []bool{errors.Is(err, context.Canceled), errors.Is(err, idempotency.ErrLeaseLost)}, []bool{true, false})
		// The operation was given up at once, and not after the lease.
		op, err := idempotency.WithLease(background, s.db, name, "k", nil, options, func(ctx context.Context, lease *idempotency.Lease) error {
			is(t, []any{lease.Outcome, lease.RecoveryPoint}, []any{"taken_over", "failed"})
			return lease.Complete(ctx, nil, idempotency.Answer{Response: 1})
		})
		must(t, err)
		is(t, op.Attempt, 2)
	})
}

func TestConsumeAfterContext(t *testing.T) {
	each(t, func(t *testing.T, s service, name string) {
		subscribed(t, s, name, 2)
		ctx, cancel := context.WithCancel(background)
		must(t, idempotency.Consume(ctx, s.db, name, func(context.Context, idempotency.Event) error {
			cancel()
			// The heartbeat keeps the batch for the event in progress.
			for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				var others int
				must(t, s.elsewhere(background, "SELECT count(*) FROM idempotency.fetch($1::text, wait => '0')", name).Scan(&others))
				is(t, others, 0)
			}
			return nil
		}, idempotency.ConsumeOptions{Lease: time.Second}))
		is(t, rest(t, s, name), []int{1})
	})
}

func TestLostBatch(t *testing.T) {
	each(t, func(t *testing.T, s service, name string) {
		subscribed(t, s, name, 2)
		handled := 0
		must(t, idempotency.Consume(background, s.db, name, func(ctx context.Context, event idempotency.Event) error {
			handled++
			// Another consumer ends the batch.
			must(t, s.elsewhere(background, "SELECT idempotency.ack($1::text, $2::bigint)", name, event.Batch).Scan(new(int64)))
			select {
			case <-ctx.Done():
			case <-time.After(time.Minute):
				t.Error("the context does not end")
			}
			return nil
		}, idempotency.ConsumeOptions{Lease: time.Second, UntilEmpty: true}))
		is(t, handled, 1)
	})
}

func TestRefusedConnection(t *testing.T) {
	for _, use := range []func(string) client{usePgx, useSQL} {
		err := idempotency.Consume(background, use(os.Getenv("PGHOST")+" user=absent").db, "none", nil, idempotency.ConsumeOptions{})
		is(t, idempotency.SQLState(err), "28000")
	}
}
