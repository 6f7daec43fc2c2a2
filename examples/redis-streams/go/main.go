// Redis Streams between two databases, with pgx and go-redis. README.md describes the commands relay and consume.
package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/redis/go-redis/v9"
)

var (
	ctx = context.Background()
	// The same call can succeed later: lost connections, serialization failures and deadlocks, no resources, lock timeouts, shutdown and
	// failover; IK408, another relay has the events of the batch; IK409, an earlier call for the same event is in progress.
	transient = regexp.MustCompile(`^(08|40|53|55P03|57P|58|25006|25P03|IK408|IK409)`)
	// The event itself is wrong: invalid data, a violated constraint, an error that the function raises.
	poison = regexp.MustCompile(`^(22|23|P0|IKFIN)`)
	fields = []string{"id", "topic", "aggregate_id", "type", "payload", "headers"}
)

// connected calls work with new connections until it fails.
func connected(work func(*pgx.Conn, *redis.Client) error) error {
	options, err := redis.ParseURL(os.Getenv("REDIS"))
	if err != nil {
		return err
	}
	options.MaxRetries = -1 // a retry of go-redis would add a batch twice without a need
	broker := redis.NewClient(options)
	defer broker.Close()
	connection, err := pgx.Connect(ctx, "")
	if err != nil {
		return err
	}
	defer connection.Close(ctx)
	for err == nil {
		err = work(connection, broker)
	}
	return err
}

// relay adds a batch to the streams events:TOPIC, in one MULTI: no event overtakes an earlier one.
func relay(connection *pgx.Conn, broker *redis.Client, subscription string) error {
	if err := broker.Ping(ctx).Err(); err != nil {
		return err // while Redis is away, no delivery is counted
	}
	rows, _ := connection.Query(ctx, `SELECT batch, ARRAY[id::text, topic, aggregate_id, type, payload::text, headers::text]
		FROM idempotency.fetch($1, wait => '10 seconds', lease => coalesce(nullif($2, ''), '30 seconds')::interval)`, subscription, os.Getenv("LEASE"))
	var batch int64
	var values []*string
	var events [][]*string
	if _, err := pgx.ForEachRow(rows, []any{&batch, &values}, func() error { events, values = append(events, values), nil; return nil }); err != nil || len(events) == 0 {
		return err
	}
	chunk := broker.TxPipeline()
	for _, event := range events {
		entry := []any{}
		for i, value := range event {
			if value != nil {
				entry = append(entry, fields[i], *value)
			}
		}
		chunk.XAdd(ctx, &redis.XAddArgs{Stream: "events:" + *event[1], Values: entry})
	}
	added, err := chunk.Exec(ctx)
	if refused := redis.Error(nil); err != nil && (!errors.As(err, &refused) || strings.HasPrefix(err.Error(), "EXECABORT")) {
		_, _ = connection.Exec(ctx, "SELECT idempotency.nack($1, $2, NULL)", subscription, batch) // counts as no event's failure
		return err
	}
	left := map[string]bool{} // later events of an aggregate leave the batch
	for i, event := range events {
		if err := added[i].Err(); err != nil && (event[2] == nil || !left[*event[2]]) {
			if _, err := connection.Exec(ctx, "SELECT idempotency.nack($1, $2, $3, $4)", subscription, batch, *event[0], err.Error()); err != nil {
				return err
			}
			if event[2] != nil {
				left[*event[2]] = true
			}
		}
	}
	_, err = connection.Exec(ctx, "SELECT idempotency.ack($1, $2)", subscription, batch)
	return err
}

// consume calls a function for each message, which commits its effect, and acknowledges the message afterwards.
func consume(connection *pgx.Conn, broker *redis.Client, stream, group, call string) error {
	if err := broker.XGroupCreateMkStream(ctx, stream, group, "0").Err(); err != nil && !strings.HasPrefix(err.Error(), "BUSYGROUP") {
		return err
	}
	// One name for all: what an earlier process has read and not acknowledged comes first.
	read := func(after string) ([]redis.XStream, error) {
		return broker.XReadGroup(ctx, &redis.XReadGroupArgs{Group: group, Consumer: "consumer", Streams: []string{stream, after}, Count: 100, Block: 5 * time.Second}).Result()
	}
	streams, err := read("0")
	if err == nil && len(streams[0].Messages) == 0 {
		streams, err = read(">")
	}
	if err != nil || len(streams) == 0 {
		if err == redis.Nil {
			return nil
		}
		return err
	}
	for _, message := range streams[0].Messages {
		values := []any{}
		for _, name := range fields {
			values = append(values, message.Values[name])
		}
		_, err := connection.Exec(ctx, "SELECT "+call+"($1::text::uuid, $2, $3, $4, $5::text::json, $6::text::json)", values...)
		if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) && poison.MatchString(refused.Code) {
			message.Values["error"] = err.Error()
			err = broker.XAdd(ctx, &redis.XAddArgs{Stream: stream + ":dead", Values: message.Values}).Err()
		}
		if err != nil {
			return err
		}
		if err := broker.XAck(ctx, stream, group, message.ID).Err(); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	commands := map[string]func(*pgx.Conn, *redis.Client) error{
		"relay": func(connection *pgx.Conn, broker *redis.Client) error { return relay(connection, broker, os.Args[2]) },
		"consume": func(connection *pgx.Conn, broker *redis.Client) error {
			return consume(connection, broker, os.Args[2], os.Args[3], os.Args[4])
		},
	}
	for pause := 50 * time.Millisecond; ; pause *= 2 {
		began := time.Now()
		err := connected(commands[os.Args[1]])
		if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) && !transient.MatchString(refused.Code) {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		// Afterwards with new connections, and after growing pauses.
		if pause > 2*time.Second || time.Since(began) > 10*time.Second {
			pause = 50 * time.Millisecond
		}
		time.Sleep(time.Duration(float64(pause) * (0.5 + rand.Float64()/2)))
	}
}
