package idempotency

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Stored are the headers of an answer that retries get, unless HTTPOptions name others.
var Stored = []string{"Cache-Control", "Content-Disposition", "Content-Language", "Content-Location", "Content-Type", "ETag", "Last-Modified",
	"Link", "Location", "Vary"}

// never are the headers of one answer, one recipient or one connection.
var never = []string{"Connection", "Content-Length", "Date", "Idempotent-Replayed", "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection",
	"Set-Cookie", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}

var (
	// malformed are the errors of a claim whose request has a body that is not JSON: a text that is no JSON, a code point or number that
	// jsonb cannot hold, too deep, too large.
	malformed = regexp.MustCompile(`^(22P02|22P05|22003|22021|5400[01])$`)
	escaped   = regexp.MustCompile(`%[0-9A-Fa-f]{2}`)
	unquoted  = regexp.MustCompile(`^[\w.:+/=-]+$`)
	boundary  = regexp.MustCompile(`(?i);\s*boundary=(?:"([^"]+)"|([^\s;]+))`)
	jsonType  = regexp.MustCompile(`(?i)^(application|text)/([^;\s]+\+)?json\s*(;|$)`)
)

// HTTPOptions are the rules for the requests of a handler.
type HTTPOptions struct {
	DB        DB
	Scope     func(*http.Request) (string, error) // the boundary of keys: the user or tenant of a request
	Lenient   bool                                // also take a key without quotes, as older clients send it
	Headers   []string                            // names of the headers that are stored; nil: Stored
	Omit      []string                            // JSON pointers of the members of the body that do not count, such as /sent_at
	Wait      time.Duration                       // how long a duplicate waits for the first request before it gets 409
	Retention time.Duration                       // how long the answer is replayed; 0: the default of the database
	MaxBody   int64                               // the largest body of a request; 0: 1 MiB
	Log       func(format string, values ...any)  // gets the errors that are answered with 500; nil: log.Printf
}

// answer is an answer to send.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// undo ends a transaction with a rollback, and carries the answer to send.
type undo struct{ answer }

func (undo) Error() string { return "rolled back" }

// refused is a request that its claim refuses; detail is empty for a missing or malformed header.
type refused struct {
	status int
	detail string
}

func (r refused) Error() string { return r.detail }

// Handler answers a request. It writes to the database through tx.Native. Its answer is kept, and sent after the commit. After an error nothing is
// stored: a transient error is answered with 503, another with 500.
type Handler func(w http.ResponseWriter, r *http.Request, tx *Tx) error

type rules struct {
	HTTPOptions
	handler Handler
	body    string // the SQL of the body in the fingerprint
	omit    []any
}

type txKey struct{}

// TxOf returns the transaction of a request that Middleware handles.
func TxOf(ctx context.Context) *Tx { return ctx.Value(txKey{}).(*Tx) }

// Middleware makes a handler of net/http idempotent, as Handle does. It writes through TxOf of the request's context.
func Middleware(options HTTPOptions) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return Handle(options, func(w http.ResponseWriter, r *http.Request, tx *Tx) error {
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), txKey{}, tx)))
			return nil
		})
	}
}

// Handle makes a handler idempotent: a retry with the same header Idempotency-Key gets the stored answer. It panics if the options are invalid.
func Handle(options HTTPOptions, handler Handler) http.Handler {
	if options.DB == nil || options.Scope == nil {
		panic("idempotency: DB and Scope are required: with one scope for all, a client could get the answer of another")
	}
	if options.Headers == nil {
		options.Headers = Stored
	}
	for i, name := range options.Headers {
		options.Headers = slices.Clone(options.Headers)
		options.Headers[i] = http.CanonicalHeaderKey(name)
		if slices.Contains(never, options.Headers[i]) {
			panic(fmt.Sprintf("idempotency: the header %s belongs to one answer or one recipient, and cannot be stored", name))
		}
	}
	options.Headers = append(options.Headers, "Content-Type", "Content-Encoding")
	if options.MaxBody == 0 {
		options.MaxBody = 1 << 20
	}
	if options.Log == nil {
		options.Log = log.Printf
	}
	m := rules{HTTPOptions: options, handler: handler, body: "$5::text"}
	for i, pointer := range options.Omit {
		path := strings.Split(pointer, "/")
		if path[0] != "" {
			panic(fmt.Sprintf("idempotency: %s is no JSON pointer, such as /sent_at", pointer))
		}
		for j := range path {
			path[j] = strings.NewReplacer("~1", "/", "~0", "~").Replace(path[j])
		}
		list, _ := json.Marshal(path[1:])
		m.omit = append(m.omit, string(list))
		m.body = fmt.Sprintf(`(SELECT CASE WHEN d #> p IS NULL THEN d ELSE d #- p END
			FROM (SELECT %s::jsonb AS d, ARRAY(SELECT jsonb_array_elements_text($%d::text::jsonb)) AS p) AS s)`, m.body, i+8)
	}
	if m.omit != nil {
		m.body += "::text"
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		found := m.serve(r)
		maps.Copy(w.Header(), found.header)
		w.WriteHeader(found.status)
		w.Write(found.body)
	})
}

// problem returns an error answer (RFC 9457).
func problem(status int, kind, detail string, header http.Header) answer {
	if header == nil {
		header = http.Header{}
	}
	header.Set("Content-Type", "application/problem+json")
	body, _ := json.Marshal(map[string]any{"type": kind, "title": http.StatusText(status), "status": status, "detail": detail})
	return answer{status, header, body}
}

// headerOf returns the header that a JSON object has.
func headerOf(text string) http.Header {
	header, names := http.Header{}, map[string]string{}
	json.Unmarshal([]byte(text), &names)
	for name, value := range names {
		header.Set(name, value)
	}
	return header
}

// sortedQuery returns a query that does not depend on the order of different parameters.
func sortedQuery(query string) string {
	parts := strings.Split(query, "&")
	slices.SortStableFunc(parts, func(a, b string) int {
		a, _, _ = strings.Cut(a, "=")
		b, _, _ = strings.Cut(b, "=")
		return strings.Compare(a, b)
	})
	return strings.Join(parts, "&")
}

// escape encodes the bytes of a text that are neither letters nor digits nor among others.
func escape(text, others string) string {
	var out strings.Builder
	for _, each := range []byte(text) {
		if each >= 'a' && each <= 'z' || each >= 'A' && each <= 'Z' || each >= '0' && each <= '9' || strings.IndexByte(others, each) >= 0 {
			out.WriteByte(each)
		} else {
			fmt.Fprintf(&out, "%%%02X", each)
		}
	}
	return out.String()
}

// fields returns the fields of a form. What is no valid encoding stands for itself: without it, two requests would be the same.
func fields(form string) map[string][]string {
	decode := func(text string) string {
		text = escaped.ReplaceAllStringFunc(strings.ReplaceAll(text, "+", " "), func(each string) string {
			part, _ := hex.DecodeString(each[1:])
			return string(part)
		})
		return string([]rune(text)) // as UTF-8
	}
	found := map[string][]string{}
	for _, part := range strings.Split(form, "&") {
		if part != "" {
			name, value, _ := strings.Cut(part, "=")
			found[decode(name)] = append(found[decode(name)], decode(value))
		}
	}
	return found
}

// document returns the JSON text that stands for a body in the fingerprint, NULL for an empty body.
func document(kind string, body []byte) (*string, error) {
	if len(body) == 0 {
		return nil, nil
	}
	if jsonType.MatchString(kind) {
		if !utf8.Valid(body) {
			return nil, refused{400, "The body is not UTF-8."}
		}
		return text(string(body)), nil
	}
	media, _, _ := strings.Cut(kind, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	var value any
	if media == "application/x-www-form-urlencoded" {
		value = fields(string(body))
	} else {
		if found := boundary.FindStringSubmatch(kind); strings.HasPrefix(media, "multipart/") && found != nil {
			// Each attempt draws another boundary.
			body = bytes.ReplaceAll(body, []byte("--"+found[1]+found[2]), []byte("--"))
		}
		sum := sha256.Sum256(body)
		value = map[string]string{"type": media, "sha256": hex.EncodeToString(sum[:])}
	}
	return encode(value)
}

// serve returns the answer to a request; what it stores has committed.
func (m rules) serve(r *http.Request) (found answer) {
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, m.MaxBody))
	if err != nil {
		return problem(http.StatusRequestEntityTooLarge, "about:blank", fmt.Sprintf("The body cannot be read, or exceeds %d bytes.", m.MaxBody), nil)
	}
	scope, err := m.Scope(r)
	if err == nil && scope == "" {
		err = errors.New("Scope returned an empty string: with one scope for all, a client could get the answer of another")
	}
	if err == nil {
		err = m.DB.Transaction(r.Context(), func(tx *Tx) error {
			found, err = m.run(tx, r, scope, body)
			return err
		})
	}
	var refusal refused
	if errors.As(err, &refusal) {
		err = m.DB.Transaction(r.Context(), func(tx *Tx) error {
			found, err = m.badRequest(r.Context(), tx, refusal)
			return err
		})
	}
	var undone undo
	switch {
	case err == nil:
		return found
	case errors.As(err, &undone):
		return undone.answer
	case IsTransient(err):
		return problem(http.StatusServiceUnavailable, "about:blank", "Try again with the same key.", http.Header{"Retry-After": {"1"}})
	}
	m.Log("idempotency: %s %s: %v", r.Method, r.URL.Path, err)
	return problem(http.StatusInternalServerError, "about:blank", "The request failed; nothing was stored.", nil)
}

// badRequest returns the answer to a refused request, which links to idempotency.documentation.
func (m rules) badRequest(ctx context.Context, tx *Tx, refusal refused) (answer, error) {
	var body, headers string
	err := tx.query(ctx, "SELECT idempotency.problem('IK400')::text, idempotency.problem_headers('IK400')::text").Scan(&body, &headers)
	if err != nil || refusal.detail == "" {
		return answer{http.StatusBadRequest, headerOf(headers), []byte(body)}, err
	}
	var document struct{ Type string }
	err = json.Unmarshal([]byte(body), &document)
	return problem(refusal.status, document.Type, refusal.detail, headerOf(headers)), err
}

// run claims, calls the handler and stores its answer, in the open transaction. An error is an undo with the answer if nothing is stored.
func (m rules) run(tx *Tx, r *http.Request, scope string, body []byte) (found answer, err error) {
	ctx, key := r.Context(), "idempotency.parse_header($2::text)"
	header := strings.Join(r.Header.Values("Idempotency-Key"), ", ")
	if m.Lenient && unquoted.MatchString(header) {
		key = "$2::text"
	}
	asked, err := url.ParseRequestURI(r.RequestURI) // http.StripPrefix changes r.URL
	if err != nil {
		asked = r.URL
	}
	path := escape(asked.Path, "_.-~/:@!$&'()*+,;=")
	if asked.RawQuery != "" {
		path += "?" + sortedQuery(escape(asked.RawQuery, "!$%&()*+,-./:;=?@[\\]^_`{|}~"))
	}
	request, err := document(r.Header.Get("Content-Type"), body)
	if err != nil {
		return found, err
	}
	var outcome string
	var status *int
	var headers, response, refusal, refusalHeaders *string
	err = tx.query(ctx, `SELECT outcome::text, status, headers::text, response::text, idempotency.problem(op)::text, idempotency.problem_headers(op)::text
		FROM idempotency.try_claim(scope => $1::text, key => `+key+`, fingerprint => idempotency.fingerprint($3::text, $4::text, `+m.body+`),
			wait => $6::text::interval, retention => $7::text::interval) AS op`, append([]any{
		scope, text(header), r.Method, path, request, fmt.Sprintf("%d microseconds", m.Wait.Microseconds()), interval(m.Retention)}, m.omit...)...).Scan(
		&outcome, &status, &headers, &response, &refusal, &refusalHeaders)
	switch state := SQLState(err); {
	case state == "IK400":
		return found, refused{status: 400}
	case malformed.MatchString(state):
		return found, refused{400, "The body is not JSON that can be compared."}
	case err != nil:
		return found, err
	case outcome == "replayed":
		return replayed(value(status), value(headers), value(response))
	case refusal != nil:
		var document struct{ Status int }
		err = json.Unmarshal([]byte(*refusal), &document)
		return found, errors.Join(err, undo{answer{document.Status, headerOf(*refusalHeaders), []byte(*refusal)}})
	}
	return m.handle(ctx, tx, r, body, scope, header, key)
}

// isPlain returns whether a body with this header is stored as it is: JSON that is not compressed.
func isPlain(header http.Header) bool {
	return jsonType.MatchString(header.Get("Content-Type")) && header.Get("Content-Encoding") == ""
}

// isFinal returns whether an answer is stored. 408, 425 and 429 ask for the same request again, as 503 does.
func isFinal(status int) bool {
	return status < 500 && status != http.StatusRequestTimeout && status != http.StatusTooEarly && status != http.StatusTooManyRequests
}

// replayed returns the answer that a row has: JSON as it is, other bytes as {"base64"}.
func replayed(status int, headers, response string) (answer, error) {
	found := answer{status, headerOf(headers), []byte(response)}
	if response != "" && !isPlain(found.header) {
		var envelope struct{ Base64 []byte }
		if err := json.Unmarshal(found.body, &envelope); err != nil {
			return found, err
		}
		found.body = envelope.Base64
	}
	found.header.Set("Idempotent-Replayed", "true")
	return found, nil
}

// handle calls the handler, and stores its answer. The writes of an answer with 400 or above are undone.
func (m rules) handle(ctx context.Context, tx *Tx, r *http.Request, body []byte, scope, header, key string) (answer, error) {
	recorder := &recorder{header: http.Header{}}
	undone := errors.New("undone")
	err := tx.Savepoint(ctx, func() error {
		r.Body = io.NopCloser(bytes.NewReader(body))
		if err := m.handler(recorder, r, tx); err != nil {
			return err
		}
		recorder.WriteHeader(http.StatusOK) // if the handler has written nothing
		if recorder.flushed {
			return errors.New("a streamed answer cannot be stored and replayed: write the whole body, or stream from a route without idempotency")
		}
		if recorder.status >= 400 {
			return undone
		}
		return nil
	})
	found := answer{recorder.status, recorder.sent, recorder.body.Bytes()}
	if err != nil && err != undone {
		return found, err
	}
	if !isFinal(found.status) {
		return found, undo{found}
	}
	kept := map[string]string{}
	for name, values := range found.header {
		if slices.Contains(m.Headers, name) {
			kept[name] = strings.Join(values, ", ")
		}
	}
	response := string(found.body)
	if response != "" && !isPlain(found.header) {
		envelope, _ := json.Marshal(map[string][]byte{"base64": found.body})
		response = string(envelope)
	}
	name := "complete"
	if found.status >= 400 {
		name = "fail"
	}
	headers, _ := json.Marshal(kept)
	var stored *string
	err = tx.query(ctx, `SELECT idempotency.`+name+`(scope => $1::text, key => `+key+`, response => $3::text, status => $4::integer,
		headers => $5::text, omit_large => true)::text`, scope, header, text(response), found.status, string(headers)).Scan(&stored)
	return found, err
}

// recorder keeps an answer.
type recorder struct {
	header, sent http.Header
	status       int
	body         bytes.Buffer
	flushed      bool
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 && status >= 200 {
		r.status, r.sent = status, r.header.Clone()
	}
}

func (r *recorder) Write(part []byte) (int, error) {
	if r.status == 0 && r.header.Get("Content-Type") == "" && r.header.Get("Content-Encoding") == "" {
		r.header.Set("Content-Type", http.DetectContentType(part))
	}
	r.WriteHeader(http.StatusOK)
	return r.body.Write(part)
}

// Flush is a sign of a streamed answer.
func (r *recorder) Flush() { r.flushed = true }
