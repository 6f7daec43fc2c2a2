// pgx, with its own transactions. play describes requests and replies.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

type request struct {
	Session, Host, Do, SQL string
	Prepared               bool
	Arguments              [][2]interface{}
}

type reply struct {
	Rows    []interface{} `json:"rows"`
	Error   *string       `json:"error,omitempty"`
	Message string        `json:"message,omitempty"`
}

// session is a connection with its transaction and savepoints, the innermost last.
type session struct {
	connection *pgx.Conn
	blocks     []pgx.Tx
}

var ctx = context.Background()

func connect(host string, prepared bool) (*session, error) {
	mode := map[bool]string{true: "cache_statement", false: "cache_describe"}[prepared]
	connection, err := pgx.Connect(ctx, fmt.Sprintf("host=%s default_query_exec_mode=%s", host, mode))
	return &session{connection: connection}, err
}

// native returns an argument in the type in which an application has it.
func native(kind string, value interface{}) interface{} {
	switch kind {
	case "wrapped":
		text, _ := json.Marshal(value)
		return string(text)
	case "UUID key":
		return uuid.MustParse(value.(string))
	case "integer key", "integer", "same":
		return int64(value.(float64))
	case "interval":
		return time.Duration(value.(float64) * float64(time.Second))
	case "bytes":
		bytes, _ := hex.DecodeString(value.(string))
		return bytes
	case "texts":
		texts := []string{}
		for _, each := range value.([]interface{}) {
			texts = append(texts, each.(string))
		}
		return texts
	case "nullable texts":
		texts := []*string{}
		for _, each := range value.([]interface{}) {
			text, ok := each.(string)
			texts = append(texts, map[bool]*string{true: &text, false: nil}[ok])
		}
		return texts
	case "UUIDs":
		uuids := []uuid.UUID{}
		for _, each := range value.([]interface{}) {
			uuids = append(uuids, uuid.MustParse(each.(string)))
		}
		return uuids
	case "integers":
		integers := []int64{}
		for _, each := range value.([]interface{}) {
			integers = append(integers, int64(each.(float64)))
		}
		return integers
	}
	return value
}

// begin begins a transaction, or within one a savepoint.
func (s *session) begin() error {
	begin := s.connection.Begin
	if len(s.blocks) > 0 {
		begin = s.blocks[len(s.blocks)-1].Begin
	}
	block, err := begin(ctx)
	if err == nil {
		s.blocks = append(s.blocks, block)
	}
	return err
}

// pop returns the innermost block, which then is none any more.
func (s *session) pop() pgx.Tx {
	block := s.blocks[len(s.blocks)-1]
	s.blocks = s.blocks[:len(s.blocks)-1]
	return block
}

// query returns the rows of a statement; with parse, each is its first column, parsed.
func (s *session) query(r request, parse bool) ([]interface{}, error) {
	arguments := []interface{}{}
	for _, argument := range r.Arguments {
		arguments = append(arguments, native(argument[0].(string), argument[1]))
	}
	found := []interface{}{}
	rows, err := s.connection.Query(ctx, r.SQL, arguments...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		values, err := rows.Values()
		if err != nil {
			return nil, err
		}
		for i, value := range values {
			if bytes, ok := value.([16]byte); ok {
				values[i] = uuid.UUID(bytes)
			}
		}
		if parse {
			var parsed interface{}
			if err := json.Unmarshal([]byte(values[0].(string)), &parsed); err != nil {
				return nil, err
			}
			found = append(found, parsed)
		} else {
			found = append(found, values)
		}
	}
	return found, rows.Err()
}

// answer does what a request says, and returns the rows.
func (s *session) answer(r request) (rows []interface{}, err error) {
	switch r.Do {
	case "begin", "savepoint":
		err = s.begin()
	case "commit":
		err = s.pop().Commit(ctx)
	case "rollback to savepoint":
		err = s.pop().Rollback(ctx)
	case "rollback":
		for len(s.blocks) > 0 {
			err = s.pop().Rollback(ctx)
		}
	default:
		rows, err = s.query(r, r.Do == "query json")
	}
	return
}

func main() {
	sessions := map[string]*session{}
	input := bufio.NewScanner(os.Stdin)
	output := json.NewEncoder(os.Stdout)
	for input.Scan() {
		var r request
		if err := json.Unmarshal(input.Bytes(), &r); err != nil {
			panic(err)
		}
		var err error
		var rows []interface{}
		key := fmt.Sprint(r.Session, r.Host, r.Prepared)
		if sessions[key] == nil {
			sessions[key], err = connect(r.Host, r.Prepared)
		}
		if err == nil {
			rows, err = sessions[key].answer(r)
		}
		if err == nil {
			output.Encode(reply{Rows: rows})
			continue
		}
		var code string
		var fault *pgconn.PgError
		if errors.As(err, &fault) {
			code = fault.Code
		}
		output.Encode(reply{Error: &code, Message: err.Error()})
	}
}
