// The application in Go, with pgx. README.md describes its commands.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/jackc/pgconn"
	"github.com/jackc/pgx/v4"
)

// The same request can succeed later: lost connections, serialization failures and
// deadlocks, no resources, lock timeouts, shutdown and failover; IK409, the first request
// is in progress; IK410, another owner took the lease over, whose result a retry returns.
var transient = regexp.MustCompile(`^(08|40|53|55P03|57P|25006|IK409|IK410)`)

// errUnavailable: the provider neither did nor refused what it was asked for.
var errUnavailable = errors.New("the provider is unavailable")

var ctx = context.Background()

// setting returns a variable of the environment, or its default.
func setting(name, otherwise string) string {
	if value, found := os.LookupEnv(name); found {
		return value
	}
	return otherwise
}

// toJSON returns the text of a JSON object.
func toJSON(members map[string]interface{}) string {
	text, _ := json.Marshal(members)
	return string(text)
}

// retrying calls work until it succeeds, with growing pauses, each time on a new
// connection. It returns an error that is not transient, and after RETRY_SECONDS the last
// one. work must begin with a claim of the same key: an attempt whose answer was lost
// might have committed.
func retrying(work func(*pgx.Conn) error) error {
	seconds, _ := strconv.ParseFloat(setting("RETRY_SECONDS", "30"), 64)
	end := time.Now().Add(time.Duration(seconds * float64(time.Second)))
	for pause := 50 * time.Millisecond; ; pause *= 2 {
		connection, err := pgx.Connect(ctx, "")
		lost := err != nil
		if err == nil {
			err = work(connection)
			lost = connection.IsClosed()
			connection.Close(ctx)
		}
		if pause > 2*time.Second {
			pause = 2 * time.Second
		}
		var fault *pgconn.PgError
		again := lost || errors.Is(err, errUnavailable) || errors.As(err, &fault) && transient.MatchString(fault.Code)
		if err == nil || !again || time.Now().Add(pause).After(end) {
			return err
		}
		time.Sleep(time.Duration(float64(pause) * (0.5 + rand.Float64()/2)))
	}
}

// charge charges a customer: key, charge and answer commit in one transaction.
func charge(key, customer string, amount int64) (response string, err error) {
	err = retrying(func(connection *pgx.Conn) error {
		return connection.BeginFunc(ctx, func(tx pgx.Tx) error {
			var replayed bool
			var stored *string
			err := tx.QueryRow(ctx, "SELECT replayed, response::text FROM idempotency.claim('charge', $1, $2)",
				key, toJSON(map[string]interface{}{"customer": customer, "amount": amount})).Scan(&replayed, &stored)
			if err != nil {
				return err
			}
			if replayed {
				response = *stored
				return nil
			}
			var id int64
			err = tx.QueryRow(ctx, "INSERT INTO charge (customer, amount) VALUES ($1, $2) RETURNING id", customer, amount).Scan(&id)
			if err != nil {
				return err
			}
			return tx.QueryRow(ctx, "SELECT idempotency.complete('charge', $1, $2, 201)::text",
				key, toJSON(map[string]interface{}{"charge": id})).Scan(&response)
		})
	})
	return
}

// askProvider charges at the provider, which itself takes an idempotency key. It returns
// its charge, or nil if the provider refuses.
func askProvider(key string, amount int64) (*string, error) {
	body := bytes.NewBufferString(toJSON(map[string]interface{}{"amount": amount}))
	request, _ := http.NewRequest("POST", os.Getenv("PROVIDER")+"/charges", body)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", `"`+key+`"`)
	// Shorter than the lease, so that the owner does not lose it meanwhile.
	response, err := (&http.Client{Timeout: 10 * time.Second}).Do(request)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", errUnavailable, err)
	}
	defer response.Body.Close()
	var answer struct{ ID string }
	if response.StatusCode == 402 {
		return nil, nil
	}
	if response.StatusCode != 201 || json.NewDecoder(response.Body).Decode(&answer) != nil {
		return nil, fmt.Errorf("%w: it answers %s", errUnavailable, response.Status)
	}
	return &answer.ID, nil
}

// order orders an item, which the provider charges. No transaction is open meanwhile; a
// lease protects the order.
func order(key, item string, amount int64) (response string, err error) {
	err = retrying(func(connection *pgx.Conn) error {
		var replayed bool
		var stored, charged *string
		var token *int64
		var providerKey string
		err := connection.QueryRow(ctx, `SELECT replayed, response::text, token, idempotency.derive_key('order', $1, 'charge')::text,
			state ->> 'charge' FROM idempotency.claim('order', $1, $2, lease => $3::text::interval)`,
			key, toJSON(map[string]interface{}{"item": item, "amount": amount}), setting("LEASE", "30 seconds")).
			Scan(&replayed, &stored, &token, &providerKey, &charged)
		if err != nil {
			return err
		}
		if replayed {
			response = *stored
			return nil
		}
		// After a takeover, the former owner might have got as far as the checkpoint.
		if charged == nil {
			charged, err = askProvider(providerKey, amount)
		}
		if err != nil {
			connection.Exec(ctx, "SELECT idempotency.release('order', $1, $2)", key, token)
			return err
		}
		if charged == nil {
			return connection.QueryRow(ctx, "SELECT idempotency.fail('order', $1, $2, 402, token => $3)::text",
				key, `{"error": "card_declined"}`, token).Scan(&response)
		}
		_, err = connection.Exec(ctx, "SELECT idempotency.checkpoint('order', $1, $2, 'charged', $3)",
			key, token, toJSON(map[string]interface{}{"charge": *charged}))
		if err != nil {
			return err
		}
		return connection.BeginFunc(ctx, func(tx pgx.Tx) error {
			var id int64
			err := tx.QueryRow(ctx, "INSERT INTO purchase (item, amount, provider_charge) VALUES ($1, $2, $3) RETURNING id",
				item, amount, *charged).Scan(&id)
			if err != nil {
				return err
			}
			return tx.QueryRow(ctx, "SELECT idempotency.complete('order', $1, $2, 201, token => $3)::text",
				key, toJSON(map[string]interface{}{"order": id}), token).Scan(&response)
		})
	})
	return
}

// message is one of a queue.
type message struct {
	ID, Customer string
	Amount       int64
}

// consume handles a batch of messages that a queue delivers at least once: each has its
// effect once.
func consume(messages []message) (string, error) {
	ids := []string{}
	for _, each := range messages {
		ids = append(ids, each.ID)
	}
	err := retrying(func(connection *pgx.Conn) error {
		return connection.BeginFunc(ctx, func(tx pgx.Tx) error {
			var fresh []string
			err := tx.QueryRow(ctx, "SELECT array_agg(id) FROM idempotency.once_many('consumer', $1, '30 days') AS id", ids).Scan(&fresh)
			isNew := map[string]bool{}
			for _, id := range fresh {
				isNew[id] = true
			}
			for _, each := range messages {
				if err == nil && isNew[each.ID] {
					delete(isNew, each.ID)
					_, err = tx.Exec(ctx, "INSERT INTO charge (customer, amount) VALUES ($1, $2)", each.Customer, each.Amount)
				}
			}
			return err
		})
	})
	// Acknowledge after the commit: a batch that is lost before is delivered again.
	return toJSON(map[string]interface{}{"acknowledged": len(messages)}), err
}

func main() {
	var response string
	var err error
	if os.Args[1] == "consume" {
		messages := []message{}
		for input := bufio.NewScanner(os.Stdin); input.Scan(); {
			var each message
			if err := json.Unmarshal(input.Bytes(), &each); err != nil {
				panic(err)
			}
			messages = append(messages, each)
		}
		response, err = consume(messages)
	} else {
		amount, _ := strconv.ParseInt(os.Args[4], 10, 64)
		response, err = map[string]func(string, string, int64) (string, error){"charge": charge, "order": order}[os.Args[1]](
			os.Args[2], os.Args[3], amount)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(response)
}
