// Package pgxadapter is the adapter of the package idempotency for pgx v5.
package pgxadapter

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	idempotency "example.org/pg-idempotency"
)

// Beginner begins transactions: *pgxpool.Pool.
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

type db struct{ beginner Beginner }

// New returns the DB of a pool. Native of its transactions is a pgx.Tx. New panics for a *pgx.Conn, whose open transaction a heartbeat
// would commit, and for a pgx.Tx, whose Begin makes a savepoint.
func New(beginner Beginner) idempotency.DB {
	switch beginner.(type) {
	case *pgx.Conn, pgx.Tx:
		panic(fmt.Sprintf("pgxadapter: pass a pool, not a %T; in a transaction of your own use With", beginner))
	}
	return db{beginner}
}

func (d db) Transaction(ctx context.Context, work func(*idempotency.Tx) error) error {
	return pgx.BeginFunc(ctx, d.beginner, func(tx pgx.Tx) error { return work(With(tx)) })
}

// With returns the calls in a transaction that your code has begun.
func With(tx pgx.Tx) *idempotency.Tx {
	query := func(ctx context.Context, sql string, args ...any) idempotency.Row {
		return tx.QueryRow(ctx, sql, args...)
	}
	exec := func(ctx context.Context, sql string) error { _, err := tx.Exec(ctx, sql); return err }
	return idempotency.NewTx(tx, query, exec)
}
