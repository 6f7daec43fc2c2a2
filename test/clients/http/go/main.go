// A service of test/clients/http/play: main pgx|sql. Prints its port. clients/README.md describes the paths.
package main

import (
	"context"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"os"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/lib/pq"

	idempotency "example.org/pg-idempotency"
	"example.org/pg-idempotency/pgxadapter"
)

// object is a value of JSON.
type object map[string]any

// row is the first row of a statement.
type query func(ctx context.Context, sql string, args ...any) idempotency.Row

// client is a driver: its database, a query in the transaction of a session, and one on another connection.
type client struct {
	db        idempotency.DB
	in        func(tx *idempotency.Tx) query
	elsewhere query
}

func usePgx(host string) client {
	config, err := pgxpool.ParseConfig("default_query_exec_mode=exec host=" + host)
	if err != nil {
		panic(err)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		panic(err)
	}
	in := func(tx *idempotency.Tx) query {
		return func(ctx context.Context, sql string, args ...any) idempotency.Row {
			return tx.Native.(pgx.Tx).QueryRow(ctx, sql, args...)
		}
	}
	return client{pgxadapter.New(pool), in, func(ctx context.Context, sql string, args ...any) idempotency.Row {
		return pool.QueryRow(ctx, sql, args...)
	}}
}

func useSQL(host string) client {
	db, err := sql.Open("postgres", "sslmode=disable host="+host)
	if err != nil {
		panic(err)
	}
	in := func(tx *idempotency.Tx) query {
		return func(ctx context.Context, text string, args ...any) idempotency.Row {
			return tx.Native.(*sql.Tx).QueryRowContext(ctx, text, args...)
		}
	}
	return client{idempotency.SQL(db), in, func(ctx context.Context, sql string, args ...any) idempotency.Row {
		return db.QueryRowContext(ctx, sql, args...)
	}}
}

type service struct{ client }

const insertion = "INSERT INTO charge (customer, amount) VALUES ($1, $2) RETURNING id"

func (s service) insert(ctx context.Context, tx *idempotency.Tx, customer string, amount int64) (id int64, err error) {
	err = s.in(tx)(ctx, insertion, customer, amount).Scan(&id)
	return
}

func (s service) failWith(ctx context.Context, tx *idempotency.Tx, state string) error {
	return s.in(tx)(ctx, "SELECT fail_with($1::text)::text", state).Scan(new(string))
}

func (s service) troubled(ctx context.Context) (trouble bool, err error) {
	err = s.elsewhere(ctx, "SELECT count(*) > 0 FROM trouble").Scan(&trouble)
	return
}

func send(w http.ResponseWriter, status int, value any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	return json.NewEncoder(w).Encode(value)
}

var sqlstate = regexp.MustCompile("^[0-9A-Z]{5}$")

// charged is the body of a charge.
type charged struct {
	Customer string
	Amount   int64
	Action   string
}

func (s service) charge(w http.ResponseWriter, r *http.Request, tx *idempotency.Tx) error {
	ctx, body := r.Context(), charged{}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		return err
	}
	if body.Action == "elsewhere" {
		err := s.elsewhere(ctx, insertion, body.Customer, body.Amount).Scan(new(int64))
		return send(w, 500, object{"error": idempotency.SQLState(err)})
	}
	id, err := s.insert(ctx, tx, body.Customer, body.Amount)
	if err != nil {
		return err
	}
	pause := 0
	if body.Action == "slow" {
		pause = 1
	}
	if err := s.in(tx)(ctx, "SELECT pg_sleep($1::integer)::text", pause).Scan(new(string)); err != nil {
		return err
	}
	switch {
	case sqlstate.MatchString(body.Action):
		return s.failWith(ctx, tx, body.Action)
	case body.Action == "duplicate" && s.failWith(ctx, tx, "23505") != nil:
		return send(w, 409, object{"error": "duplicate"})
	case body.Action == "missing":
		_, err := os.ReadFile("/nonexistent/file")
		return err
	case body.Action == "decline":
		return send(w, 402, object{"error": "card_declined"})
	case body.Action == "overload":
		return send(w, 503, object{"error": "overload"})
	case body.Action == "limit":
		w.Header().Set("Retry-After", "7")
		return send(w, 429, object{"error": "limit"})
	case body.Action == "crash":
		if trouble, err := s.troubled(ctx); err != nil || trouble {
			return errors.Join(errors.New("a bug"), err)
		}
	}
	w.Header().Set("Location", fmt.Sprintf("/charges/%d", id))
	return send(w, 201, object{"id": id, "customer": body.Customer})
}

func (s service) answer(w http.ResponseWriter, r *http.Request, tx *idempotency.Tx) error {
	if _, err := s.insert(r.Context(), tx, "answer", 1); err != nil {
		return err
	}
	w.Header().Set("ETag", `"1"`)
	w.Header().Set("Set-Cookie", "session=1")
	w.Header().Set("X-Request-Id", fmt.Sprint(rand.Float64()))
	if encoding := r.URL.Query().Get("encoding"); encoding != "" {
		w.Header().Set("Content-Encoding", encoding)
	}
	if !r.URL.Query().Has("body") {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	body, err := base64.URLEncoding.WithPadding(base64.NoPadding).DecodeString(r.URL.Query().Get("body"))
	if err != nil {
		body, err = base64.URLEncoding.DecodeString(r.URL.Query().Get("body"))
	}
	w.Header().Set("Content-Type", r.URL.Query().Get("type"))
	w.Write(body)
	return err
}

func (s service) stream(w http.ResponseWriter, r *http.Request) {
	s.insert(r.Context(), idempotency.TxOf(r.Context()), "stream", 1)
	for _, part := range []string{"a", "b"} {
		io.WriteString(w, part)
		w.(http.Flusher).Flush()
	}
}

// ----------------------------------------------------------------
// The functions of the package
// ----------------------------------------------------------------

// asked is the body of a request to a function.
type asked struct {
	charged
	Key, Topic, Aggregate, Subscription string
	Keys                                []string
	Payload                             json.RawMessage
	Stop, Fail                          bool
}

// request is what counts of a charge.
func (a asked) request() object {
	return object{"customer": a.Customer, "amount": a.Amount, "action": a.Action}
}

var errDeclined = errors.New("card_declined")

func (s service) once(ctx context.Context, body asked) (op idempotency.Operation, err error) {
	err = s.db.Transaction(ctx, func(tx *idempotency.Tx) (err error) {
		if op, err = tx.Claim(ctx, "run", body.Key, body.request(), idempotency.ClaimOptions{}); err != nil || op.Replayed {
			return err
		}
		fault := tx.Savepoint(ctx, func() error {
			if _, err := s.insert(ctx, tx, body.Customer, body.Amount); err != nil {
				return err
			}
			if body.Action == "decline" {
				return errDeclined
			}
			if body.Action != "" {
				return s.failWith(ctx, tx, body.Action)
			}
			return nil
		})
		switch fault {
		case nil:
			op.Status = 200
			op.Response, err = tx.Complete(ctx, "run", body.Key, idempotency.Answer{Response: object{"customer": body.Customer}})
		case errDeclined:
			op.Status, op.Failed = 402, true
			op.Response, err = tx.Fail(ctx, "run", body.Key, idempotency.Answer{Response: object{"error": "card_declined"}, Status: 402})
		default:
			err = fault
		}
		return err
	})
	return
}

func (s service) lease(ctx context.Context, body asked) (any, error) {
	var state json.RawMessage
	request := object{"customer": body.Customer, "amount": body.Amount}
	op, err := idempotency.WithLease(ctx, s.db, "lease", body.Key, request, idempotency.ClaimOptions{Lease: time.Second, Wait: -1},
		func(ctx context.Context, lease *idempotency.Lease) error {
			state = lease.State
			if body.Action == "decline" {
				return lease.Fail(ctx, nil, idempotency.Answer{Response: object{"error": "card_declined"}, Status: 402})
			}
			if err := lease.Checkpoint(ctx, "charged", object{"charge": "ch_1"}); err != nil {
				return err
			}
			for body.Action == "hold" {
				if trouble, err := s.troubled(ctx); err != nil || !trouble {
					break
				}
				time.Sleep(50 * time.Millisecond)
			}
			if trouble, _ := s.troubled(ctx); body.Action == "crash" && trouble {
				return errors.New("a bug")
			}
			err := lease.Transaction(ctx, func(tx *idempotency.Tx) error {
				if _, err := s.insert(ctx, tx, body.Customer, body.Amount); err != nil {
					return err
				}
				err := lease.Complete(ctx, tx, idempotency.Answer{Response: object{"customer": body.Customer}})
				if body.Action == "ignore" {
					err = errors.New("a bug")
				}
				return err
			})
			if body.Action == "ignore" {
				err = nil
			}
			return err
		})
	attempt := &op.Attempt
	if op.Replayed {
		attempt = nil
	}
	return object{"replayed": op.Replayed, "attempt": attempt, "state": state, "response": op.Response}, err
}

func (s service) consume(ctx context.Context, body asked) (any, error) {
	handled := []object{}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	err := idempotency.Consume(ctx, s.db, body.Subscription, func(ctx context.Context, event idempotency.Event) error {
		var payload charged
		if err := json.Unmarshal(event.Payload.(json.RawMessage), &payload); err != nil {
			return err
		}
		if body.Stop {
			stop()
			return ctx.Err()
		}
		if payload.Customer == "poison" {
			return idempotency.DeadLetter{Err: errors.New("poison \x00 \xff")}
		}
		if payload.Customer == "flaky" && event.Attempt == 1 {
			return errors.New("flaky")
		}
		handled = append(handled, object{"customer": payload.Customer, "attempt": event.Attempt})
		return s.db.Transaction(ctx, func(tx *idempotency.Tx) error {
			fresh, err := tx.Once(ctx, "consume", event.ID, 0)
			if err == nil && fresh {
				_, err = s.insert(ctx, tx, payload.Customer, 1)
			}
			return err
		})
	}, idempotency.ConsumeOptions{UntilEmpty: true})
	return object{"handled": handled}, err
}

func (s service) functions() map[string]func(context.Context, asked) (any, error) {
	return map[string]func(context.Context, asked) (any, error){
		"/run": func(ctx context.Context, body asked) (any, error) {
			op, err := s.once(ctx, body)
			return object{"replayed": op.Replayed, "failed": op.Failed, "status": op.Status, "response": op.Response}, err
		},
		"/retrying": func(ctx context.Context, body asked) (any, error) {
			var op idempotency.Operation
			attempts := 0
			err := idempotency.Retrying(ctx, 0, func() (err error) {
				attempts++
				body.Action = ""
				if attempts < 3 {
					body.Action = "40001"
				}
				op, err = s.once(ctx, body)
				return err
			})
			return object{"attempts": attempts, "response": op.Response}, err
		},
		"/open": func(ctx context.Context, body asked) (any, error) {
			return nil, s.db.Transaction(ctx, func(tx *idempotency.Tx) error {
				if _, err := tx.Claim(ctx, "open", body.Key, nil, idempotency.ClaimOptions{}); err != nil {
					return err
				}
				_, err := s.insert(ctx, tx, body.Customer, body.Amount)
				return err
			})
		},
		"/once": func(ctx context.Context, body asked) (any, error) {
			var fresh bool
			err := s.db.Transaction(ctx, func(tx *idempotency.Tx) (err error) {
				if fresh, err = tx.Once(ctx, "once", body.Key, 0); body.Fail {
					s.failWith(ctx, tx, "23505")
				} else if err == nil && fresh {
					_, err = s.insert(ctx, tx, "once", 1)
				}
				return err
			})
			return object{"new": fresh}, err
		},
		"/once_many": func(ctx context.Context, body asked) (any, error) {
			var fresh []string
			err := s.db.Transaction(ctx, func(tx *idempotency.Tx) (err error) {
				fresh, err = tx.OnceMany(ctx, "once", body.Keys, 0)
				return err
			})
			return object{"new": fresh}, err
		},
		"/lease": s.lease,
		"/publish": func(ctx context.Context, body asked) (any, error) {
			var id string
			err := s.db.Transaction(ctx, func(tx *idempotency.Tx) (err error) {
				id, err = tx.Publish(ctx, idempotency.Event{Topic: body.Topic, Payload: body.Payload, AggregateID: body.Aggregate})
				return err
			})
			return object{"published": len(id) == 36}, err
		},
		"/consume": s.consume,
	}
}

func main() {
	use := map[string]func(string) client{"pgx": usePgx, "sql": useSQL}[os.Args[1]]
	s, unavailable := service{use(os.Getenv("PGHOST"))}, use("/nonexistent")
	user := func(r *http.Request) (string, error) {
		if user := r.Header.Get("X-User"); user != "" {
			return user, nil
		}
		return "http", nil
	}
	log := func(string, ...any) {}
	options := idempotency.HTTPOptions{DB: s.db, Scope: user, Log: log}
	handle := func(path string, handler idempotency.Handler, change func(*idempotency.HTTPOptions)) {
		options := options
		change(&options)
		http.Handle(path, idempotency.Handle(options, handler))
	}
	handle("/charges", s.charge, func(*idempotency.HTTPOptions) {})
	handle("/lenient", s.charge, func(o *idempotency.HTTPOptions) {
		o.Lenient, o.Scope = true, func(*http.Request) (string, error) { return "lenient", nil }
	})
	handle("/scopeless", s.charge, func(o *idempotency.HTTPOptions) {
		o.Scope = func(*http.Request) (string, error) { return "", nil }
	})
	handle("/waiting", s.charge, func(o *idempotency.HTTPOptions) { o.Wait = 30 * time.Second })
	handle("/unavailable", s.charge, func(o *idempotency.HTTPOptions) { o.DB = unavailable.db })
	handle("/omitting", s.charge, func(o *idempotency.HTTPOptions) { o.Omit = []string{"/sent_at", "/meta/trace"} })
	handle("/answer", s.answer, func(*idempotency.HTTPOptions) {})
	handle("/listed", s.answer, func(o *idempotency.HTTPOptions) { o.Headers = []string{"X-Request-Id"} })
	http.Handle("/stream", idempotency.Middleware(options)(http.HandlerFunc(s.stream)))
	for path, function := range s.functions() {
		http.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			var body asked
			var found any
			err := json.NewDecoder(r.Body).Decode(&body)
			if err == nil {
				found, err = function(r.Context(), body)
			}
			switch {
			case err == nil:
				send(w, 200, found)
			case idempotency.IsTransient(err):
				send(w, 503, object{"error": idempotency.SQLState(err)})
			default:
				send(w, 500, object{"error": idempotency.SQLState(err)})
			}
		})
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	panic(http.Serve(listener, nil))
}
