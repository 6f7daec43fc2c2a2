// The application in Go, with pgx. README.md describes its commands.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// The same request can succeed later: lost connections, serialization failures and
// deadlocks, no resources, lock timeouts, shutdown and failover; IK409, the first request
// is in progress; IK410, another owner took the lease over, whose result a retry returns;
// IK408, another consumer has the events of the batch.
var transient = regexp.MustCompile(`^(08|40|53|55P03|57P|58|25006|25P03|IK408|IK409|IK410)`)

var ctx = context.Background()

// retrying calls work until it succeeds, each time on a new connection, with growing pauses. It returns errors that are not transient,
// and RETRY_SECONDS after the first failure the last one. work must begin with a claim, or with a fetch: an attempt whose answer was lost might have committed.
func retrying(work func(*pgx.Conn) error) error {
	var failed time.Time
	limit := 30.0
	fmt.Sscan(os.Getenv("RETRY_SECONDS"), &limit)
	for pause := 0.05; ; pause *= 2 {
		connection, err := pgx.Connect(ctx, "")
		if err == nil {
			err = work(connection)
			connection.Close(ctx)
		}
		// Without an SQLSTATE, the connection was lost or not made, or the provider is unavailable.
		var fault interface{ SQLState() string }
		again := !errors.As(err, &fault) || transient.MatchString(fault.SQLState())
		if failed.IsZero() {
			failed = time.Now()
		}
		if err == nil || !again || time.Since(failed).Seconds()+pause > limit {
			return err
		}
		time.Sleep(time.Duration(pause * (0.5 + rand.Float64()/2) * float64(time.Second)))
	}
}

// charge charges a customer: key, charge and answer commit in one transaction.
func charge(key, customer string, amount int64) (response string, err error) {
	err = retrying(func(connection *pgx.Conn) error {
		return pgx.BeginFunc(ctx, connection, func(tx pgx.Tx) error {
			var replayed bool
			if err := tx.QueryRow(ctx, `SELECT replayed, coalesce(response::text, '')
				FROM idempotency.claim('charge', $1, json_build_object('customer', $2::text, 'amount', $3::bigint))`,
				key, customer, amount).Scan(&replayed, &response); err != nil || replayed {
				return err
			}
			return tx.QueryRow(ctx, `WITH made AS (INSERT INTO charge (customer, amount) VALUES ($2, $3) RETURNING id)
				SELECT idempotency.complete('charge', $1, json_build_object('charge', id), 201)::text FROM made`,
				key, customer, amount).Scan(&response)
		})
	})
	return
}

// order orders an item, which the provider charges. No transaction is open meanwhile; a lease protects the order.
func order(key, item string, amount int64) (response string, err error) {
	lease := os.Getenv("LEASE")
	if lease == "" {
		lease = "30 seconds"
	}
	err = retrying(func(connection *pgx.Conn) error {
		var replayed bool
		var token *int64
		var providerKey, charged string
		err := connection.QueryRow(ctx, `SELECT replayed, coalesce(response::text, ''), token,
			idempotency.derive_key('order', $1, 'charge')::text, coalesce(state ->> 'charge', '') FROM idempotency.claim(
			'order', $1, json_build_object('item', $2::text, 'amount', $3::bigint), lease => $4::text::interval)`,
			key, item, amount, lease).Scan(&replayed, &response, &token, &providerKey, &charged)
		if err != nil || replayed {
			return err
		}
		if charged == "" { // after a takeover, the former owner might have stored the charge
			charged, err = askProvider(providerKey, amount)
		}
		switch {
		case err == errRefused:
			return connection.QueryRow(ctx, `SELECT idempotency.fail('order', $1, '{"error": "card_declined"}', 402, token => $2)::text`, key, token).Scan(&response)
		case err != nil:
			// The checkpoint keeps the request: the provider might have charged it.
			connection.Exec(ctx, "SELECT idempotency.checkpoint('order', $1, $2, 'asked'), idempotency.release('order', $1, $2)", key, token)
			return err
		}
		if _, err = connection.Exec(ctx, "SELECT idempotency.checkpoint('order', $1, $2, 'charged', json_build_object('charge', $3::text))",
			key, token, charged); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, connection, func(tx pgx.Tx) error {
			// Refuses a former owner before it writes, and holds off a takeover until the commit.
			if _, err := tx.Exec(ctx, "SELECT idempotency.renew('order', $1, $2, $3::text::interval)", key, token, lease); err != nil {
				return err
			}
			return tx.QueryRow(ctx, `WITH made AS (INSERT INTO purchase (item, amount, provider_charge) VALUES ($3, $4, $5) RETURNING id)
				SELECT idempotency.complete('order', $1, json_build_object('order', id), 201, token => $2)::text FROM made`,
				key, token, item, amount, charged).Scan(&response)
		})
	})
	return
}

// consume handles a batch of messages that a queue delivers at least once: each has its effect once.
func consume(input *json.Decoder) (string, error) {
	type message struct {
		ID, Customer string
		Amount       int64
	}
	messages, ids := map[string]message{}, []string{}
	for input.More() {
		var each message
		if err := input.Decode(&each); err != nil {
			return "", err
		}
		messages[each.ID], ids = each, append(ids, each.ID)
	}
	err := retrying(func(connection *pgx.Conn) error {
		return pgx.BeginFunc(ctx, connection, func(tx pgx.Tx) error {
			var fresh []string
			err := tx.QueryRow(ctx, "SELECT array_agg(id) FROM idempotency.once_many('consumer', $1, '30 days') AS id", ids).Scan(&fresh)
			for i := 0; i < len(fresh) && err == nil; i++ {
				each := messages[fresh[i]]
				_, err = tx.Exec(ctx, "INSERT INTO charge (customer, amount) VALUES ($1, $2)", each.Customer, each.Amount)
			}
			return err
		})
	})
	return fmt.Sprintf(`{"acknowledged": %d}`, len(ids)), err // after the commit: a batch that is lost before is delivered again
}

// event is what a consumer needs of an event.
type event struct {
	Batch                  int64
	ID, Aggregate, Payload string
}

// events charges orders at the provider, one for each event of a subscription. As many of these consumers as the subscription has
// partitions work at the same time.
func events(subscription string) (string, error) {
	lease := os.Getenv("LEASE")
	if lease == "" {
		lease = "3 minutes" // longer than the provider needs for a batch: afterwards, another consumer gets its events
	}
	work := func(connection *pgx.Conn) error {
		// Committed at once, so that the delivery counts even if this program dies.
		rows, _ := connection.Query(ctx, `SELECT batch, id::text, coalesce(aggregate_id, ''), coalesce(payload::text, 'null')
			FROM idempotency.fetch($1, max_events => 10, wait => '10 seconds', lease => $2::text::interval)`, subscription, lease)
		batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[event])
		if err != nil || len(batch) == 0 {
			return err
		}
		left := map[string]bool{} // aggregates whose events have left the batch
		for _, each := range batch {
			if left[each.Aggregate] {
				continue
			}
			// Read here and not in the query: an error of a fetch rolls it back, and counts for no event.
			var order struct{ Amount int64 }
			fault := json.Unmarshal([]byte(each.Payload), &order)
			if fault == nil {
				_, fault = askProvider(each.ID, order.Amount) // which recognizes a redelivered event by its id
			}
			if fault != nil {
				if _, err := connection.Exec(ctx, "SELECT idempotency.nack($1, $2, $3, $4, dead => $5)",
					subscription, each.Batch, each.ID, fault.Error(), fault == errRefused); err != nil {
					return err
				}
				left[each.Aggregate] = each.Aggregate != ""
			}
		}
		_, err = connection.Exec(ctx, "SELECT idempotency.ack($1, $2)", subscription, batch[0].Batch)
		return err
	}
	for {
		if err := retrying(work); err != nil {
			return "", err
		}
	}
}

func main() {
	amount, _ := strconv.ParseInt(os.Args[len(os.Args)-1], 10, 64)
	commands := map[string]func() (string, error){
		"charge":  func() (string, error) { return charge(os.Args[2], os.Args[3], amount) },
		"order":   func() (string, error) { return order(os.Args[2], os.Args[3], amount) },
		"consume": func() (string, error) { return consume(json.NewDecoder(os.Stdin)) },
		"events":  func() (string, error) { return events(os.Args[2]) },
	}
	response, err := commands[os.Args[1]]()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(response)
}
