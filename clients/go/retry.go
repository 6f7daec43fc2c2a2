package idempotency

import (
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"math/rand"
	"net"
	"regexp"
	"time"
)

// The same call with the same key can succeed later: lost connections, serialization failures and deadlocks, no resources,
// lock timeouts, shutdown, failover and a session that was idle too long; IK409, another owner is at work; IK410, another owner took the lease over; IK408,
// another consumer has the events of the batch.
var transient = regexp.MustCompile(`^(08|40|53|55P03|57P|58|25006|25P03|IK408|IK409|IK410)`)

// SQLState returns the SQLSTATE of an error of pgx or lib/pq, or "".
func SQLState(err error) string {
	var fault interface{ SQLState() string }
	if errors.As(err, &fault) {
		return fault.SQLState()
	}
	return ""
}

// IsTransient returns whether a call that failed with this error can succeed later.
func IsTransient(err error) bool {
	if state := SQLState(err); state != "" {
		return transient.MatchString(state)
	}
	var network *net.OpError // any url.Error and any errno is a net.Error
	var name *net.DNSError
	var safe interface{ SafeToRetry() bool } // of pgx, for a connection that was lost before
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return false
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed), errors.Is(err, driver.ErrBadConn):
		return true
	}
	return errors.As(err, &network) || errors.As(err, &name) || errors.As(err, &safe) && safe.SafeToRetry()
}

// Retrying calls work until it succeeds, with growing pauses. It returns at once an error that is not transient, and limit after the
// first failure the last one; limit 0 is 30 seconds. work must begin its own transaction with a claim of the same key, or a
// fetch: an attempt whose answer was lost might have committed.
func Retrying(ctx context.Context, limit time.Duration, work func() error) error {
	var failed time.Time
	if limit == 0 {
		limit = 30 * time.Second
	}
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		err := work()
		if err == nil || !IsTransient(err) {
			return err
		}
		if failed.IsZero() {
			failed = time.Now()
		}
		if time.Since(failed) > limit-pause {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Duration(float64(pause) * (0.5 + rand.Float64()/2))):
		}
	}
}
