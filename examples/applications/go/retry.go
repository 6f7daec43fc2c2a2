// The retry loop.
package main

import (
	"errors"
	"fmt"
	"math"
	"math/rand"
	"os"
	"regexp"
	"time"

	"github.com/jackc/pgx/v4"
)

// The same request can succeed later: lost connections, serialization failures and
// deadlocks, no resources, lock timeouts, shutdown and failover; IK409, the first request
// is in progress; IK410, another owner took the lease over, whose result a retry returns.
var transient = regexp.MustCompile(`^(08|40|53|55P03|57P|25006|IK409|IK410)`)

// retrying calls work until it succeeds, each time on a new connection, with growing
// pauses. It returns errors that are not transient, and the last error after RETRY_SECONDS.
// work must begin with a claim: an attempt whose answer was lost might have committed.
func retrying(work func(*pgx.Conn) error) error {
	began, limit := time.Now(), 30.0
	fmt.Sscan(os.Getenv("RETRY_SECONDS"), &limit)
	for pause := 0.05; ; pause = math.Min(2*pause, 2) {
		connection, err := pgx.Connect(ctx, "")
		lost := err != nil
		if err == nil {
			err = work(connection)
			lost = connection.IsClosed()
			connection.Close(ctx)
		}
		var fault interface{ SQLState() string }
		again := lost || errors.Is(err, errUnavailable) || errors.As(err, &fault) && transient.MatchString(fault.SQLState())
		if err == nil || !again || time.Since(began).Seconds()+pause > limit {
			return err
		}
		time.Sleep(time.Duration(pause * (0.5 + rand.Float64()/2) * float64(time.Second)))
	}
}
